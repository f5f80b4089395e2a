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

from tests.helpers.data import make_set, read_files
from ttvd.data.corruptions import corrupt, describe
from ttvd.data.export import ExportSettings, export_set, name_class_folders
from ttvd.data.sets import ImageFolder, ImageSet, from_arrays, load_set
from ttvd.data.sets.official import FASHION

SETTINGS = ExportSettings(("gaussian_noise", "contrast"), (2, 5), seed=3)


@pytest.fixture
def clean() -> ImageSet:
    return make_set(7)


def check_sums(folder: Path) -> None:
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    sums = {line[66:]: line[:64] for line in lines}
    files = {
        name: content
        for name, content in read_files(folder).items()
        if name not in ("SHA256SUMS", "manifest.json")
    }
    assert {name: hashlib.sha256(content).hexdigest() for name, content in files.items()} == sums


def test_stacks_hold_the_corrupted_images_in_order(clean: ImageSet, tmp_path: Path) -> None:
    export_set(clean, tmp_path, SETTINGS)
    labels = np.load(tmp_path / "labels.npy")
    assert labels.dtype == np.uint8
    assert labels.tolist() == clean.labels.tolist() * 2
    for name in SETTINGS.corruptions:
        stack = np.load(tmp_path / f"{name}.npy")
        expected = torch.cat([corrupt(clean.floats(), name, severity, seed=3) for severity in (2, 5)])
        assert stack.shape == (14, 16, 16, 3)
        assert (stack == (expected * 255).round().permute(0, 2, 3, 1).numpy()).all()
    check_sums(tmp_path)


def test_stacks_load_again(clean: ImageSet, tmp_path: Path) -> None:
    export_set(clean, tmp_path, SETTINGS)
    for severity in (2, 5):
        found = load_set("stack", tmp_path, corruption="contrast", severity=severity)
        torch.testing.assert_close(found.floats(), corrupt(clean.floats(), "contrast", severity, seed=3))
        assert found.labels.tolist() == clean.labels.tolist()
    with pytest.raises(ValueError, match=r"severities \[2, 5\], got 1"):
        load_set("stack", tmp_path, corruption="contrast", severity=1)


def test_the_manifest_says_what_it_is(clean: ImageSet, tmp_path: Path) -> None:
    export_set(clean, tmp_path, SETTINGS)
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
    export_set(clean, tmp_path / "a", SETTINGS)
    monkeypatch.setattr("ttvd.data.export._BATCH_VALUES", 3 * 16 * 16 * 2)
    export_set(clean, tmp_path / "b", SETTINGS)
    assert read_files(tmp_path / "a") == read_files(tmp_path / "b")


class Killed(BaseException):
    """Stops an export at a certain step, as a signal would."""


@pytest.mark.parametrize("layout", ["cifar", "folder"])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_an_interrupted_export_goes_on(
    layout: Any, step: int, clean: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_set(clean, tmp_path / "whole", SETTINGS, layout=layout, image_format="png")
    steps = iter(range(step))

    def interrupt(name: str, count: int) -> None:
        if next(steps, None) is None:
            raise Killed

    with pytest.raises(Killed):
        export_set(clean, tmp_path / "cut", SETTINGS, layout=layout, image_format="png", progress=interrupt)
    cut = read_files(tmp_path / "cut")
    whole = read_files(tmp_path / "whole")
    assert all(whole[name] == cut[name] for name in cut if name not in ("manifest.json", "SHA256SUMS"))
    made: list[str] = []
    original = ExportSettings.apply

    def spy(self: ExportSettings, images: Any, name: str, severity: int, index: Any) -> Any:
        made.append(f"{name} {severity}")
        return original(self, images, name, severity, index)

    monkeypatch.setattr(ExportSettings, "apply", spy)
    export_set(clean, tmp_path / "cut", SETTINGS, layout=layout, image_format="png")
    assert read_files(tmp_path / "cut") == whole
    assert len(made) < 4 or (layout, step) == ("cifar", 1)


KILL = """
import os, signal, sys, torch
from ttvd.data.export import ExportSettings, export_set
from ttvd.data.sets import from_arrays
clean = from_arrays(torch.zeros(600, 3, 16, 16), torch.arange(600) % 3)
def kill(name, count):
    if name == "fog":
        os.kill(os.getpid(), signal.SIGKILL)
import ttvd.data.export as export
export._BATCH_VALUES = 3 * 16 * 16 * 100
export_set(clean, sys.argv[1], ExportSettings(("contrast", "fog"), (5,)), progress=kill)
"""


def test_a_killed_process_leaves_no_half_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = subprocess.run([sys.executable, "-c", KILL, str(out)], timeout=60, check=False).returncode
    assert code == -9
    visible = {path.name for path in out.iterdir() if not path.name.startswith(".")}
    assert visible == {"manifest.json", "SHA256SUMS", "labels.npy", "contrast.npy"}
    clean = from_arrays(torch.zeros(600, 3, 16, 16), torch.arange(600) % 3)
    export_set(clean, out, ExportSettings(("contrast", "fog"), (5,)))
    assert {path.name for path in out.iterdir()} == visible | {"fog.npy"}
    check_sums(out)


def test_damaged_files_are_made_again(clean: ImageSet, tmp_path: Path) -> None:
    export_set(clean, tmp_path, SETTINGS)
    before = read_files(tmp_path)
    (tmp_path / "contrast.npy").write_bytes(b"damaged")
    (tmp_path / "labels.npy").unlink()
    with (tmp_path / "SHA256SUMS").open("a") as file:
        file.write("1234abcd")  # a line that a kill cut off
    export_set(clean, tmp_path, SETTINGS)
    assert read_files(tmp_path) == before


def test_corruptions_can_be_added(clean: ImageSet, tmp_path: Path) -> None:
    export_set(clean, tmp_path, ExportSettings(("contrast",), (5,)))
    before = (tmp_path / "contrast.npy").stat().st_mtime_ns
    export_set(clean, tmp_path, ExportSettings(("fog",), (5,)))
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
    options: dict[str, Any] = {
        "corruptions": SETTINGS.corruptions,
        "severities": SETTINGS.severities,
        "seed": 3,
    }
    export_set(clean, tmp_path, ExportSettings(**options))
    before = read_files(tmp_path)
    with pytest.raises(ValueError, match=f"holds another export: its {key} differs"):
        export_set(clean, tmp_path, ExportSettings(**options | change))
    with pytest.raises(ValueError, match="its source differs"):
        export_set(clean.subset([0, 1]), tmp_path, SETTINGS)
    with pytest.raises(ValueError, match="its layout differs"):
        export_set(clean, tmp_path, SETTINGS, layout="folder")
    assert read_files(tmp_path) == before


def test_trees_of_a_set_keep_the_order_of_the_labels(clean: ImageSet, tmp_path: Path) -> None:
    export_set(clean, tmp_path, SETTINGS, layout="folder", image_format="png")
    tree = ImageFolder(tmp_path / "contrast" / "5", None, None)
    assert tree.classes == clean.classes
    order = torch.tensor(sorted(range(7), key=lambda place: (int(clean.labels[place]), place)))
    assert torch.equal(tree.labels, clean.labels[order])
    torch.testing.assert_close(tree.floats(), corrupt(clean.floats(), "contrast", 5, seed=3)[order])
    check_sums(tmp_path)


def test_classes_that_are_not_sorted_are_numbered() -> None:
    images = from_arrays(torch.rand(10, 1, 8, 8), torch.arange(10), classes=FASHION)
    folders = name_class_folders(images)
    assert folders == sorted(folders)
    assert folders[0] == "0-T-shirt-top"
    assert name_class_folders(from_arrays(torch.rand(11, 1, 8, 8), torch.arange(11)))[2] == "02"


def test_trees_of_a_folder_keep_its_names(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for path in ("n01/a.jpg", "n01/b.png", "n02/c.JPEG"):
        (tmp_path / "in" / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (40, 50, 3), np.uint8)).save(tmp_path / "in" / path)
    clean = ImageFolder(tmp_path / "in", 32, 24)
    export_set(
        clean,
        tmp_path / "out",
        ExportSettings(("contrast",), (1,), constants="imagenet"),
        layout="folder",
        workers=0,
    )
    names = sorted(name for name in read_files(tmp_path / "out") if name.startswith("contrast"))
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
        export_set(clean, tmp_path, SETTINGS, progress=lambda name, count: counts.append(count))
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
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExportSettings(**options)


def test_bad_layouts_leave_nothing(clean: ImageSet, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown layout"):
        export_set(clean, tmp_path / "out", SETTINGS, layout="tree")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        export_set(clean, tmp_path, SETTINGS)
