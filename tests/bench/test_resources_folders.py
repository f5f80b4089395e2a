"""Runs on folders of pictures, from the files to the numbers: the layouts of ImageNet-C and ImageNet-R."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ttvd
from tests.helpers.picture_trees import CLASSES, plant
from ttvd.bench.figures import check_figures, make_figure
from ttvd.bench.job import execute, make_order
from ttvd.bench.plan import plan
from ttvd.bench.recipe import parse_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import Domain, Spec, WorkerConfig
from ttvd.data.digits import split_digits
from ttvd.data.sets import ImageFolder
from ttvd.source import estimate_sites
from ttvd.zoo.checkpoint import Card, build_model, save_checkpoint

C = 'data.set = "imagenet-c"\ndata.corruptions = ["fog"]\nstream.batch_size = 4\ncheckpoints.plain = "net"\n'
R = C.replace("imagenet-c", "imagenet-r").replace("fog", "none")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant(tmp_path_factory.mktemp("pictures"))


def make_resources(root: Path) -> Resources:
    return Resources(WorkerConfig(root, root / "models"))


def make_spec(resources: Resources, text: str, method: str = "bn") -> Spec:
    return plan(parse_recipe(f'{text}[[methods]]\nname = "{method}"', "test"), resources)[0].spec


def test_released_pictures_against_a_loop_written_by_hand(root: Path) -> None:
    resources = make_resources(root)
    spec = make_spec(resources, C)
    run, order = execute(spec, resources), make_order(spec, resources)[:, 1]
    folder = ImageFolder(root / "ImageNet-C" / "fog" / "5", resize=None)
    adapter = ttvd.create("bn", ttvd.load("net", root / "models").model)
    for number, row in enumerate(run.record.rows):
        rows = torch.from_numpy(order[4 * number : 4 * number + 4])
        right = adapter(folder.floats(rows)).argmax(1) == folder.labels[rows]
        assert row.metrics["correct"] == int(right.sum())
    assert run.totals["n"] == 8


def test_a_set_that_shows_some_classes_is_scored_among_them(root: Path) -> None:
    resources = make_resources(root)
    spec = make_spec(resources, R)
    run, order = execute(spec, resources), make_order(spec, resources)[:, 1]
    folder = ImageFolder(root / "imagenet-r")
    adapter, correct = ttvd.create("bn", ttvd.load("net", root / "models").model), 0
    for start in (0, 4):
        rows = torch.from_numpy(order[start : start + 4])
        logits = adapter(folder.floats(rows))[:, [CLASSES.index(name) for name in folder.classes]]
        correct += int((logits.argmax(1) == folder.labels[rows]).sum())
    assert folder.classes == (CLASSES[1], CLASSES[3])
    assert run.totals["error"] == (6 - correct) / 6
    oracle = execute(replace(spec, selection="oracle", steps=2), resources)
    assert (
        oracle.totals["error"] == run.totals["error"]
    )  # these steps change nothing, so that all are the best


def test_the_classes_of_the_whole_set_must_be_there_before_anything_starts(
    root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root / "imagenet-r", tmp_path / "imagenet-r")
    resources = Resources(WorkerConfig(tmp_path, root / "models"))
    with pytest.raises(ValueError, match="class folders, which tell the outputs of the model, are not in"):
        make_spec(resources, R)


def test_domains_of_one_stream_show_the_same_images(root: Path, tmp_path: Path) -> None:
    resources, joined = (
        make_resources(root),
        C.replace('["fog"]', '["fog", "snow"]') + 'stream.join = "continual"\n',
    )
    spec = make_spec(resources, joined)
    assert spec.domains == (Domain("fog"), Domain("snow"))
    assert execute(spec, resources).totals["n"] == 16
    shutil.copytree(root / "ImageNet-C", tmp_path / "ImageNet-C")
    (tmp_path / "ImageNet-C" / "snow" / "5" / CLASSES[0] / "1.png").unlink()
    with pytest.raises(ValueError, match=r"fog 5 \(8\) and in snow 5 \(7\)"):
        make_spec(Resources(WorkerConfig(tmp_path, root / "models")), joined)


def test_pictures_that_changed_since_the_plan_are_noticed(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "ImageNet-C", tmp_path / "ImageNet-C")
    setting = WorkerConfig(tmp_path, root / "models")
    spec = make_spec(Resources(setting), C)
    (tmp_path / "ImageNet-C" / "fog" / "5" / CLASSES[0] / "1.png").unlink()
    with pytest.raises(ValueError, match="if they were changed meanwhile"):
        execute(spec, Resources(setting))


def test_a_stack_of_the_user_comes_corrupted(tmp_path: Path) -> None:
    _, _, images, labels = split_digits()
    pixels = (images[:40] * 255).round().byte().permute(0, 2, 3, 1).numpy()
    np.save(tmp_path / "fog.npy", np.concatenate([pixels] * 5))
    np.save(tmp_path / "labels.npy", np.tile(labels[:40].numpy(), 5))
    resources = Resources(WorkerConfig(tmp_path))
    spec = make_spec(resources, C.replace("imagenet-c", "stack").replace('"net"', '"digits-plain"'), "source")
    assert spec.constants == "official"
    assert execute(spec, resources).totals["error"] < 0.1  # nothing happens to them any more


def test_training_pictures_are_not_looked_for_among_other_sets(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "ImageNet-C", tmp_path / "ImageNet-C")
    resources = Resources(WorkerConfig(tmp_path, root / "models"))
    with pytest.raises(ValueError, match=r"adanpc needs features.*training pictures"):
        make_spec(resources, C, "adanpc")
    whole = make_resources(root)
    assert execute(make_spec(whole, C, "adanpc"), whole).totals["n"] == 8


@pytest.fixture
def own_arrays(tmp_path: Path) -> Path:
    _, _, images, labels = split_digits()
    np.save(tmp_path / "images.npy", (images[:64] * 255).round().byte().numpy())
    np.save(tmp_path / "labels.npy", labels[:64].numpy())
    return tmp_path


ARRAYS = 'data.set = "arrays"\ndata.corruptions = ["none"]\ncheckpoints.plain = "digits-plain"\n'


def test_sets_without_training_images_are_for_methods_that_need_none(own_arrays: Path) -> None:
    resources = Resources(WorkerConfig(own_arrays))
    assert execute(make_spec(resources, ARRAYS, "source"), resources).totals["n"] == 64
    with pytest.raises(ValueError, match=r"line 'eata': eata needs fisher, .*arrays has no training split"):
        make_spec(resources, ARRAYS, "eata")
    with pytest.raises(ValueError, match=r"civd needs sites, .*save sites beside digits-rotation"):
        make_spec(resources, ARRAYS + 'checkpoints.sites = "digits-rotation"\n', "civd")
    beside = make_spec(resources, ARRAYS + 'checkpoints.sites = "digits-sla"\n', "civd")
    assert execute(beside, resources).totals["error"] < 0.1


def test_figures_on_folders_are_refused_by_the_plan_or_can_be_made(root: Path, tmp_path: Path) -> None:
    small = {"num_classes": 4 * len(CLASSES), "in_channels": 3, "widths": [4, 6], "blocks": [1, 1]}
    card = Card("resnet", small, head_views=4)
    torch.manual_seed(0)
    model = build_model(card)
    save_checkpoint(tmp_path / "sla.safetensors", model, card)
    text = (
        'data.set = "folder"\ndata.corruptions = ["none"]\nstream.batch_size = 2\ncheckpoints.sites = "sla"\n'
    )
    text += '[[methods]]\nname = "civd"\n[[figures]]\nkind = "samples"\n'
    recipe, config = parse_recipe(text, "own"), WorkerConfig(root / "val", tmp_path)
    with pytest.raises(ValueError, match=r"figure 01-samples: .*folder has no training split"):
        check_figures(recipe, Resources(config))
    sites = estimate_sites(model, ImageFolder(root / "val"), num_classes=len(CLASSES), views=4)
    sites.with_temperatures({"vd": 1.0, "civd@-0.8": 1.0}).save(tmp_path / "sla.sites.safetensors")
    resources = Resources(config)
    check_figures(recipe, resources)
    assert make_figure(recipe.figures[0], recipe, resources)[0]["seen"] == len(CLASSES)
