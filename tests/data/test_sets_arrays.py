"""Arrays of every form, plain and not so plain."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ttvd.data.sets import ImageSet, from_arrays, from_dataset, load_arrays, load_set

MARKER = "smuggled"


class Bomb:
    """Pickles into a command."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {MARKER}",)


@pytest.mark.parametrize("kind", ["objects", "pickle", "truncated", "header", "empty", "npz", "negative"])
def test_arrays_that_are_not_plain_are_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "fog.npy"
    np.save(path, np.zeros((5, 8, 8, 3), np.uint8))
    np.save(tmp_path / "labels.npy", np.zeros(5, np.uint8))
    if kind == "objects":
        np.save(path, np.array([Bomb()], object), allow_pickle=True)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    elif kind == "negative":
        path.write_bytes(path.read_bytes().replace(b"(5, ", b"(-5,"))
    elif kind == "npz":
        with path.open("wb") as file:
            np.savez(file, a=np.zeros(1))
    else:
        size = {"truncated": -7, "header": 20, "empty": 0}[kind]
        path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"fog\.npy") as error:
        load_set("stack", tmp_path, corruption="fog")
    assert "allow_pickle" not in str(error.value)
    assert not Path(MARKER).exists()


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.rand(2, 3, 8, 8) + 0.5, [0, 1], r"must lie in \[0, 1\]"),
        (torch.full((2, 3, 8, 8), float("nan")), [0, 1], r"must lie in \[0, 1\]"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.int32), [0, 1], "bytes or floats"),
        (torch.zeros(2, 5, 8, 8), [0, 1], "1 or 3 channels"),
        (torch.zeros(2, 3, 8, 8), [0, 1, 0], "2 images but 3 labels"),
        (torch.zeros(2, 3, 8, 8), [0, -1], "labels must be from 0"),
        (torch.zeros(2, 3, 8, 8), [0.0, 1.0], "labels must be integers"),
        (torch.zeros(0, 3, 8, 8), np.zeros(0, int), "no images"),
        (np.full((2, 8, 8), None), [0, 1], "bytes or floats"),
    ],
)
def test_bad_arrays_are_refused(images: Any, labels: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_arrays(images, labels)


def test_arrays_of_every_form_become_the_same_set(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 9, 8, 3), np.uint8)
    labels = np.array([0, 2, 1, 0], np.int32)
    first = from_arrays(images, labels)
    floats = from_arrays(
        torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).float() / 255, torch.tensor(labels)
    )
    np.savez(tmp_path / "set.npz", images=images, labels=labels)
    np.save(tmp_path / "pictures.npy", images)
    np.save(tmp_path / "labels.npy", labels)
    items = from_dataset([(image, label) for image, label in zip(images, labels, strict=True)])
    others = [floats, load_arrays(tmp_path / "set.npz"), load_set("arrays", tmp_path / "pictures.npy"), items]
    for other in others:
        assert isinstance(other, ImageSet)
        assert torch.equal(other.images, first.images)
        assert torch.equal(other.labels, first.labels)
        assert other.fingerprint() == first.fingerprint()
    assert from_arrays(images, labels + 1).fingerprint() != first.fingerprint()


def test_archives_without_the_arrays_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", pixels=np.zeros(3))
    with pytest.raises(ValueError, match="no array 'images'"):
        load_arrays(tmp_path / "set.npz")
    with pytest.raises(ValueError, match="one size"):
        from_dataset([(np.zeros((8, 8, 3)), 0), (np.zeros((9, 8, 3)), 0)])


def test_images_on_an_unknown_scale_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mode L, RGB or F, got \['P', 'YCbCr'\]"):
        from_dataset([(Image.new(mode, (8, 8)), 0) for mode in ("YCbCr", "L", "P")])
    with pytest.raises(ValueError, match="from 2 to 2"):
        from_arrays(np.full((2, 8, 8), 2, np.longdouble), [0, 0])
    with pytest.raises(ValueError, match=r"uint16.*65535"):
        from_arrays(np.zeros((2, 8, 8), np.uint16), [0, 0])
