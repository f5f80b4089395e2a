"""Exports: their layouts, that they go on after a kill, and that they say what they are."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ttvd.data.corruptions import corrupt, describe
from ttvd.data.export import Plan, export_set, plan, trees
from ttvd.data.sets import ImageFolder, ImageSet, from_arrays, load_set
from ttvd.data.sets.official import FASHION

PLAN = Plan(("gaussian_noise", "contrast"), (2, 5), seed=3)


@pytest.fixture
def clean() -> ImageSet:
    images = torch.rand(7, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return from_arrays(images, [0, 1, 2, 2, 1, 0, 1], classes=("ant", "bee", "cow"), name="toy")


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_sums(folder: Path) -> None:
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    sums = {line[66:]: line[:64] for line in lines}
    files = {
        name: content
        for name, content in read_all(folder).items()
        if name not in ("SHA256SUMS", "manifest.json")
    }
    assert {name: hashlib.sha256(content).hexdigest() for name, content in files.items()} == sums


def test_stacks_hold_the_corrupted_images_in_order(clean: ImageSet, tmp_path: Path) -> None:
    export_set(clean, tmp_path, PLAN)
    labels = np.load(tmp_path / "labels.npy")
    assert labels.dtype == np.uint8
    assert labels.tolist() == clean.labels.tolist() * 2
    for name in PLAN.corruptions:
        stack = np.load(tmp_path / f"{name}.npy")
        expected = torch.cat([corrupt(clean.floats(), name, severity, seed=3) for severity in (2, 5)])
        assert stack.shape == (14, 16, 16, 3)
        assert (stack == (expected * 255).round().permute(0, 2, 3, 1).numpy()).all()
    check_sums(tmp_path)


def test_stacks_load_again(clean: ImageSet, tmp_path: Path) -> None:
    export_set(clean, tmp_path, PLAN)
    for severity in (2, 5):
        found = load_set("stack", tmp_path, corruption="contrast", severity=severity)
        torch.testing.assert_close(found.floats(), corrupt(clean.floats(), "contrast", severity, seed=3))
        assert found.labels.tolist() == clean.labels.tolist()
    with pytest.raises(ValueError, match=r"severities \[2, 5\], got 1"):
        load_set("stack", tmp_path, corruption="contrast", severity=1)


def test_the_manifest_says_what_it_is(clean: ImageSet, tmp_path: Path) -> None:
    export_set(clean, tmp_path, PLAN)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["seed"] == 3
    assert manifest["source"] == {"name": "toy", "images": 7, "sha256": clean.fingerprint()}
    assert manifest["corruptions"]["contrast"] == [describe("contrast", 2), describe("contrast", 5)]
    assert manifest["finished"] == ["contrast", "gaussian_noise"]
    assert sorted(manifest["files"]) == ["contrast.npy", "gaussian_noise.npy", "labels.npy"]
    assert (
        manifest["files"]["contrast.npy"]
        == hashlib.sha256((tmp_path / "contrast.npy").read_bytes()).hexdigest()
    )


def test_batches_do_not_matter(clean: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_set(clean, tmp_path / "a", PLAN)
    monkeypatch.setattr("ttvd.data.export._VALUES", 3 * 16 * 16 * 2)
    export_set(clean, tmp_path / "b", PLAN)
    assert read_all(tmp_path / "a") == read_all(tmp_path / "b")


class Killed(BaseException):
    """Stops an export at a certain step, as a signal would."""


@pytest.mark.parametrize("layout", ["cifar", "folder"])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_an_interrupted_export_goes_on(
    layout: Any, step: int, clean: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_set(clean, tmp_path / "whole", PLAN, layout=layout, image_format="png")
    steps = iter(range(step))

    def interrupt(name: str, count: int) -> None:
        if next(steps, None) is None:
            raise Killed

    with pytest.raises(Killed):
        export_set(clean, tmp_path / "cut", PLAN, layout=layout, image_format="png", advance=interrupt)
    cut = read_all(tmp_path / "cut")
    whole = read_all(tmp_path / "whole")
    assert all(whole[name] == cut[name] for name in cut if name not in ("manifest.json", "SHA256SUMS"))
    made: list[str] = []
    original = Plan.apply

    def spy(self: Plan, images: Any, name: str, severity: int, index: Any) -> Any:
        made.append(f"{name} {severity}")
        return original(self, images, name, severity, index)

    monkeypatch.setattr(plan.Plan, "apply", spy)
    export_set(clean, tmp_path / "cut", PLAN, layout=layout, image_format="png")
    assert read_all(tmp_path / "cut") == whole
    assert len(made) < 4 or (layout, step) == ("cifar", 1)


KILL = """
import os, signal, sys, torch
from ttvd.data.export import Plan, export_set
from ttvd.data.sets import from_arrays
clean = from_arrays(torch.zeros(600, 3, 16, 16), torch.arange(600) % 3)
def kill(name, count):
    if name == "fog":
        os.kill(os.getpid(), signal.SIGKILL)
import ttvd.data.export as source
source._VALUES = 3 * 16 * 16 * 100
export_set(clean, sys.argv[1], Plan(("contrast", "fog"), (5,)), advance=kill)
"""


def test_a_killed_process_leaves_no_half_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = subprocess.run([sys.executable, "-c", KILL, str(out)], timeout=60, check=False).returncode
    assert code == -9
    visible = {path.name for path in out.iterdir() if not path.name.startswith(".")}
    assert visible == {"manifest.json", "SHA256SUMS", "labels.npy", "contrast.npy"}
    clean = from_arrays(torch.zeros(600, 3, 16, 16), torch.arange(600) % 3)
    export_set(clean, out, Plan(("contrast", "fog"), (5,)))
    assert {path.name for path in out.iterdir()} == visible | {"fog.npy"}
    check_sums(out)


def test_damaged_files_are_made_again(clean: ImageSet, tmp_path: Path) -> None:
    export_set(clean, tmp_path, PLAN)
    before = read_all(tmp_path)
    (tmp_path / "contrast.npy").write_bytes(b"damaged")
    (tmp_path / "labels.npy").unlink()
    with (tmp_path / "SHA256SUMS").open("a") as file:
        file.write("1234abcd")  # a line that a kill cut off
    export_set(clean, tmp_path, PLAN)
    assert read_all(tmp_path) == before


def test_corruptions_can_be_added(clean: ImageSet, tmp_path: Path) -> None:
    export_set(clean, tmp_path, Plan(("contrast",), (5,)))
    before = (tmp_path / "contrast.npy").stat().st_mtime_ns
    export_set(clean, tmp_path, Plan(("fog",), (5,)))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["finished"] == sorted(manifest["corruptions"]) == ["contrast", "fog"]
    assert "contrast.npy" in manifest["files"]
    assert (tmp_path / "contrast.npy").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"seed": 4}, "seed"),
        ({"severities": (5,)}, "severities"),
        ({"constants": "imagenet"}, "constants"),
    ],
)
def test_another_export_in_the_folder_is_refused(
    change: dict[str, Any], key: str, clean: ImageSet, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"corruptions": PLAN.corruptions, "severities": PLAN.severities, "seed": 3}
    export_set(clean, tmp_path, Plan(**options))
    before = read_all(tmp_path)
    with pytest.raises(ValueError, match=f"holds another export: its {key} differs"):
        export_set(clean, tmp_path, Plan(**options | change))
    with pytest.raises(ValueError, match="its source differs"):
        export_set(clean.subset([0, 1]), tmp_path, PLAN)
    with pytest.raises(ValueError, match="its layout differs"):
        export_set(clean, tmp_path, PLAN, layout="folder")
    assert read_all(tmp_path) == before


def test_trees_of_a_set_keep_the_order_of_the_labels(clean: ImageSet, tmp_path: Path) -> None:
    export_set(clean, tmp_path, PLAN, layout="folder", image_format="png")
    tree = ImageFolder(tmp_path / "contrast" / "5", None, None)
    assert tree.classes == clean.classes
    order = torch.tensor(sorted(range(7), key=lambda place: (int(clean.labels[place]), place)))
    assert torch.equal(tree.labels, clean.labels[order])
    torch.testing.assert_close(tree.floats(), corrupt(clean.floats(), "contrast", 5, seed=3)[order])
    check_sums(tmp_path)


def test_classes_that_are_not_sorted_are_numbered() -> None:
    images = from_arrays(torch.rand(10, 1, 8, 8), torch.arange(10), classes=FASHION)
    folders = trees.name_folders(images)
    assert folders == sorted(folders)
    assert folders[0] == "0-T-shirt-top"
    assert trees.name_folders(from_arrays(torch.rand(11, 1, 8, 8), torch.arange(11)))[2] == "02"


def test_trees_of_a_folder_keep_its_names(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for path in ("n01/a.jpg", "n01/b.png", "n02/c.JPEG"):
        (tmp_path / "in" / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (40, 50, 3), np.uint8)).save(tmp_path / "in" / path)
    clean = ImageFolder(tmp_path / "in", 32, 24)
    export_set(
        clean, tmp_path / "out", Plan(("contrast",), (1,), constants="imagenet"), layout="folder", workers=0
    )
    names = sorted(name for name in read_all(tmp_path / "out") if name.startswith("contrast"))
    assert names == [f"contrast/1/{name}.JPEG" for name in ("n01/a", "n01/b", "n02/c")]
    found = load_set("imagenet-c", tmp_path / "out", corruption="contrast", severity=1)
    assert isinstance(found, ImageFolder)
    picture = ImageFolder(found.root, None, None).floats()
    assert picture.shape == (3, 3, 24, 24)
    expected = corrupt(clean.floats(), "contrast", 1, constants="imagenet")
    assert (picture - expected).abs().mean() < 0.05  # JPEG loses a little
    Image.new("RGB", (50, 40)).save(tmp_path / "in" / "n01" / "a.png")
    with pytest.raises(ValueError, match="differ in their suffix only"):
        export_set(ImageFolder(tmp_path / "in", 32, 24), tmp_path / "other", layout="folder")


def test_progress_counts_every_image_once(clean: ImageSet, tmp_path: Path) -> None:
    counts: list[int] = []
    for run in (1, 2):
        export_set(clean, tmp_path, PLAN, advance=lambda name, count: counts.append(count))
        assert sum(counts) == run * 2 * 2 * 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corruptions": ("fogg",)}, "did you mean 'fog'"),
        ({"severities": (0,)}, "severity must be an integer from 1 to 5, got 0"),
        ({"severities": (6,)}, "got 6"),
        ({"severities": (5, 1)}, "must ascend"),
        ({"severities": ()}, "at least one"),
        ({"corruptions": ("fog", "fog")}, "distinct"),
        ({"constants": "mnist"}, "unknown table of constants"),
        ({"frost": "ice"}, "unknown kind of frost"),
        ({"device": "abacus"}, "'abacus' cannot be used"),
    ],
)
def test_bad_plans_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**options)


def test_bad_layouts_leave_nothing(clean: ImageSet, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown layout"):
        export_set(clean, tmp_path / "out", PLAN, layout="tree")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        export_set(clean, tmp_path, PLAN)
