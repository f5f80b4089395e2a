"""The tool that makes plain and fine-tuned CIFAR checkpoints, end to end on a few pictures and a tiny network."""

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tools import finetune_cifar as tool
from torch import nn

from ttvd.bench.plan import plan
from ttvd.bench.recipe import parse_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import WorkerConfig
from ttvd.data.sets import load_set
from ttvd.data.sets.official import LAYOUTS
from ttvd.methods import create
from ttvd.nn.rotation import RotationNet
from ttvd.nn.split import split
from ttvd.source import Epoch, estimate_sites, train
from ttvd.zoo.catalog import load
from ttvd.zoo.checkpoint import Card, build_model, save_checkpoint

COUNT = 40
"""Images in each file, of which CIFAR-10 has five for training."""
SIZES = {"num_classes": 10, "widths": [8, 16], "blocks": [1, 1], "bias": True}
CARD = Card("resnet", SIZES, 1, True, "CIFAR-10", accuracy_one_view=0.5)


@pytest.fixture(scope="module", autouse=True)
def small_files() -> Iterator[None]:
    small = replace(LAYOUTS["cifar10"], records={"train": COUNT, "test": COUNT})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LAYOUTS, "cifar10", small)
        yield


def write_cifar(folder: Path) -> Path:
    """Five files for training and one for the test, of classes that are patterns under much noise."""
    draw = np.random.default_rng(0)
    patterns = draw.integers(0, 256, (10, 3, 4, 4)).repeat(8, 2).repeat(8, 3).reshape(10, -1)
    place = folder / "cifar-10-batches-bin"
    place.mkdir(parents=True)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        # Neither in order nor at random: every tenth image is held out, and all classes must be among them.
        labels = (np.arange(COUNT) + np.arange(COUNT) // 10) % 10
        pixels = (patterns[labels] + draw.normal(0, 400, (COUNT, 3072))).clip(0, 255)
        rows = np.column_stack([labels, pixels]).astype(np.uint8)
        (place / f"{name}.bin").write_bytes(rows.tobytes())
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, and with a classifier whose head knows their class means, beside a rotation head."""
    root = tmp_path_factory.mktemp("world")
    images = load_set("cifar10", write_cifar(root / "data"), "train")
    torch.manual_seed(0)
    model = build_model(CARD)
    for _ in range(20):  # running statistics
        model.train()(images.floats()[:50])
    means = estimate_sites(model, images, views=1).means[:, 0].float()
    with torch.no_grad():
        head = split(model).linear
        head.weight.copy_(2 * means)
        assert head.bias is not None
        head.bias.copy_(-means.square().sum(1))
    (root / "models").mkdir()
    save_checkpoint(root / "models" / "resnet26-cifar10-rotation.safetensors", model, CARD)
    return root


def run(world: Path, out: Path, *more: str) -> None:
    where = {"--data": world / "data", "--checkpoints": world / "models", "--out": out}
    flags = [text for flag, path in where.items() for text in (flag, str(path))]
    tool.main([*flags, "--sets", "cifar10", "--epochs", "2", *more])


@pytest.fixture(scope="module")
def made(world: Path) -> Path:
    run(world, world / "made")
    return world / "made"


def original(world: Path) -> nn.Module:
    return load("resnet26-cifar10-rotation", world / "models").model


def test_the_plain_checkpoint_is_the_class_head_with_sites_of_four_turns(world: Path, made: Path) -> None:
    plain, x = load("resnet26-cifar10-plain", made), torch.rand(16, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(plain.model(x), original(world)(x))
    assert not isinstance(plain.model, RotationNet)
    assert plain.sites is not None
    assert (plain.sites.num_classes, plain.sites.views) == (10, 4)
    assert plain.sites.counts.sum() == 4 * 0.9 * 5 * COUNT
    assert {"pd", "vd", "civd@1", "cipd@1"} <= set(plain.sites.temperatures)
    assert plain.card is not None
    assert (plain.card.head_views, plain.card.rotation_head) == (1, False)
    assert "resnet26-cifar10-rotation" in plain.card.data
    assert create("ttvd", plain.model, sites=plain.sites)(x).shape == (16, 10)


def test_before_fine_tuning_every_rotation_of_a_class_says_what_the_class_said(world: Path) -> None:
    options = Namespace(data=world / "data", checkpoints=world / "models", limit=None, device="cpu")
    job = tool.prepare("cifar10", options)
    model, card = tool.augment(job)
    x = torch.rand(16, 3, 32, 32)
    with torch.no_grad():
        columns = model.eval()(x).unflatten(1, (10, 4))
        expected = original(world)(x)
    for turn in range(4):
        assert torch.allclose(columns[..., turn], expected, rtol=0, atol=1e-6)
    assert (card.head_views, card.arguments["num_classes"]) == (4, 40)
    assert job.card.arguments["num_classes"] == 10


def test_the_fine_tuned_checkpoint_loads_and_has_learnt(world: Path, made: Path) -> None:
    tuned, x = load("resnet26-cifar10-finetuned", made), torch.rand(16, 3, 32, 32)
    with torch.no_grad():
        columns = tuned.model(x).unflatten(1, (10, 4))
        assert not torch.allclose(columns[..., 0], original(world)(x), atol=1e-3)
    assert not torch.equal(columns[..., 0], columns[..., 1])  # two steps tell the turns apart, if barely
    assert tuned.sites is not None
    assert (tuned.sites.num_classes, tuned.sites.views) == (10, 4)
    card = tuned.card
    assert card is not None
    assert card.accuracy_one_view is not None
    assert card.accuracy_four_views is not None
    assert "fine-tuned for 2 epochs by label augmentation from resnet26-cifar10-rotation" in card.data
    assert card.training["objective"] == "sla"
    assert create("ttvd", tuned.model, sites=tuned.sites, rotation_weight=1.0)(x).shape == (16, 10)
    assert not list(made.glob("*.training"))


def test_a_recipe_finds_them_in_the_folder_of_checkpoints(world: Path, made: Path) -> None:
    text = """
data.set = "cifar10"
data.corruptions = ["fog"]
checkpoints = { plain = "resnet26-cifar10-plain", sites = "resnet26-cifar10-plain" }
[[methods]]
name = ["bn", "ttvd"]
[[methods]]
name = "bn"
label = "four views"
checkpoint = "resnet26-cifar10-finetuned"
views = 4
"""
    members = plan(parse_recipe(text, "test"), Resources(WorkerConfig(data=world / "data", checkpoints=made)))
    assert [member.label for member in members] == ["bn", "ttvd", "four views"]


def stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_what_is_there_is_not_made_again(
    world: Path, made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is left to do")

    before = stamps(made)
    monkeypatch.setattr(tool, "train", refuse)
    monkeypatch.setattr(tool, "estimate_sites", refuse)
    run(world, made)
    assert stamps(made) == before
    assert capsys.readouterr().out.count("is there already") == 2
    with pytest.raises(AssertionError, match="nothing is left"):
        run(world, made, "--lr", "0.01")  # another fine-tuning


def test_killed_it_goes_on_after_the_last_epoch(
    world: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []

    def stop_after_first(*args: Any, progress: Any, **more: Any) -> None:
        def watch(epoch: Epoch) -> None:
            trained.append(epoch.number)
            progress(epoch)
            if len(trained) == 1:
                raise KeyboardInterrupt

        train(*args, progress=watch, **more)

    monkeypatch.setattr(tool, "train", stop_after_first)
    with pytest.raises(KeyboardInterrupt):
        run(world, tmp_path)
    assert len(list(tmp_path.glob("*.training"))) == 1
    run(world, tmp_path)
    assert trained == [0, 1]
    assert not list(tmp_path.glob("*.training"))
    cards = [
        json.loads((folder / "resnet26-cifar10-finetuned.json").read_text()) for folder in (made, tmp_path)
    ]
    assert cards[0] == cards[1]  # with the fingerprints of the weights


def test_a_trial_says_so_on_the_cards(world: Path, tmp_path: Path) -> None:
    run(world, tmp_path, "--limit", "150", "--epochs", "1")
    for kind in ("plain", "finetuned"):
        found = load(f"resnet26-cifar10-{kind}", tmp_path)
        assert found.card is not None
        assert "a trial with 135 of the training images" in found.card.data
        assert found.sites is not None
        assert found.sites.counts.sum() == 4 * 135


def test_mistakes_are_told_before_anything_is_made(world: Path, tmp_path: Path) -> None:
    (world / "empty").mkdir()
    arguments = ["--data", f"{world / 'data'}", "--checkpoints", f"{world / 'empty'}", "--out", f"{tmp_path}"]
    with pytest.raises(
        SystemExit, match=r"no checkpoint resnet26-cifar10-rotation in .*train_cifar\.py --data"
    ):
        tool.main([*arguments, "--sets", "cifar10"])
    with pytest.raises(SystemExit, match="no checkpoint resnet26-cifar100-rotation"):
        tool.main(["--data", f"{tmp_path}", "--checkpoints", f"{world / 'models'}", "--sets", "cifar100"])
    with pytest.raises(SystemExit, match="ttvd data get cifar10"):
        tool.main(["--data", f"{tmp_path}", "--checkpoints", f"{world / 'models'}", "--sets", "cifar10"])
    with pytest.raises(SystemExit, match="no samples of class"):
        run(world, tmp_path / "few", "--limit", "9")
    with pytest.raises(SystemExit, match="epochs must be at least 1"):
        run(world, tmp_path / "none", "--epochs", "0")
    assert not list(tmp_path.rglob("*.safetensors"))
