"""Runs on folders of pictures, from the files to the numbers: the layouts of ImageNet-C and ImageNet-R."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ttvd
from tests.bench.picture_trees import CLASSES, plant
from ttvd.bench.job import execute, make_order
from ttvd.bench.recipe import parse_recipe, plan
from ttvd.bench.setting import Setting
from ttvd.bench.spec import Domain, Spec
from ttvd.bench.supply import Supply
from ttvd.data.digits import split_digits
from ttvd.data.sets import ImageFolder

C = 'data.set = "imagenet-c"\ndata.corruptions = ["fog"]\nstream.batch_size = 4\ncheckpoints.plain = "net"\n'
R = C.replace("imagenet-c", "imagenet-r").replace("fog", "none")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant(tmp_path_factory.mktemp("pictures"))


def make_supply(root: Path) -> Supply:
    return Supply(Setting(root, root / "models"))


def make_spec(supply: Supply, text: str, method: str = "bn") -> Spec:
    return plan(parse_recipe(f'{text}[[methods]]\nname = "{method}"', "test"), supply)[0].spec


def test_released_pictures_against_a_loop_written_by_hand(root: Path) -> None:
    supply = make_supply(root)
    spec = make_spec(supply, C)
    run, order = execute(spec, supply), make_order(spec, supply)[:, 1]
    folder = ImageFolder(root / "ImageNet-C" / "fog" / "5", resize=None)
    adapter = ttvd.create("bn", ttvd.load("net", root / "models").model)
    for number, row in enumerate(run.record.rows):
        rows = torch.from_numpy(order[4 * number : 4 * number + 4])
        right = adapter(folder.floats(rows)).argmax(1) == folder.labels[rows]
        assert row.metrics["correct"] == int(right.sum())
    assert run.totals["n"] == 8


def test_a_set_that_shows_some_classes_is_scored_among_them(root: Path) -> None:
    supply = make_supply(root)
    spec = make_spec(supply, R)
    run, order = execute(spec, supply), make_order(spec, supply)[:, 1]
    folder = ImageFolder(root / "imagenet-r")
    adapter, correct = ttvd.create("bn", ttvd.load("net", root / "models").model), 0
    for start in (0, 4):
        rows = torch.from_numpy(order[start : start + 4])
        logits = adapter(folder.floats(rows))[:, [CLASSES.index(name) for name in folder.classes]]
        correct += int((logits.argmax(1) == folder.labels[rows]).sum())
    assert folder.classes == (CLASSES[1], CLASSES[3])
    assert run.totals["error"] == (6 - correct) / 6
    oracle = execute(replace(spec, selection="oracle", steps=2), supply)
    assert (
        oracle.totals["error"] == run.totals["error"]
    )  # these steps change nothing, so that all are the best


def test_the_classes_of_the_whole_set_must_be_there_before_anything_starts(
    root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root / "imagenet-r", tmp_path / "imagenet-r")
    supply = Supply(Setting(tmp_path, root / "models"))
    with pytest.raises(ValueError, match="class folders, which tell the outputs of the model, are not in"):
        make_spec(supply, R)


def test_domains_of_one_stream_show_the_same_images(root: Path, tmp_path: Path) -> None:
    supply, joined = (
        make_supply(root),
        C.replace('["fog"]', '["fog", "snow"]') + 'stream.join = "continual"\n',
    )
    spec = make_spec(supply, joined)
    assert spec.domains == (Domain("fog"), Domain("snow"))
    assert execute(spec, supply).totals["n"] == 16
    shutil.copytree(root / "ImageNet-C", tmp_path / "ImageNet-C")
    (tmp_path / "ImageNet-C" / "snow" / "5" / CLASSES[0] / "1.png").unlink()
    with pytest.raises(ValueError, match=r"fog 5 \(8\) and in snow 5 \(7\)"):
        make_spec(Supply(Setting(tmp_path, root / "models")), joined)


def test_pictures_that_changed_since_the_plan_are_noticed(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "ImageNet-C", tmp_path / "ImageNet-C")
    setting = Setting(tmp_path, root / "models")
    spec = make_spec(Supply(setting), C)
    (tmp_path / "ImageNet-C" / "fog" / "5" / CLASSES[0] / "1.png").unlink()
    with pytest.raises(ValueError, match="if they were changed meanwhile"):
        execute(spec, Supply(setting))


def test_a_stack_of_the_user_comes_corrupted(tmp_path: Path) -> None:
    _, _, images, labels = split_digits()
    pixels = (images[:40] * 255).round().byte().permute(0, 2, 3, 1).numpy()
    np.save(tmp_path / "fog.npy", np.concatenate([pixels] * 5))
    np.save(tmp_path / "labels.npy", np.tile(labels[:40].numpy(), 5))
    supply = Supply(Setting(tmp_path))
    spec = make_spec(supply, C.replace("imagenet-c", "stack").replace('"net"', '"digits-plain"'), "source")
    assert spec.constants == "official"
    assert execute(spec, supply).totals["error"] < 0.1  # nothing happens to them any more


def test_training_pictures_are_not_looked_for_among_other_sets(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "ImageNet-C", tmp_path / "ImageNet-C")
    supply = Supply(Setting(tmp_path, root / "models"))
    with pytest.raises(FileNotFoundError, match="training pictures"):
        execute(make_spec(supply, C, "adanpc"), supply)
    whole = make_supply(root)
    assert execute(make_spec(whole, C, "adanpc"), whole).totals["n"] == 8
