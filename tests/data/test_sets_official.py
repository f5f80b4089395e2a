"""CIFAR in its binary, python and corrupted layouts, whole and damaged."""

import pickle
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ttvd.data.sets import ImageSet, load_set
from ttvd.data.sets.official import CIFAR10_CLASSES, CIFAR100_CLASSES, LAYOUTS

Bytes = npt.NDArray[np.uint8]
COUNT = 12


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Official layouts with 12 images in each file."""
    for name, layout in list(LAYOUTS.items()):
        monkeypatch.setitem(LAYOUTS, name, replace(layout, records={"train": COUNT, "test": COUNT}))


def draw(seed: int, classes: int = 10) -> tuple[Bytes, Bytes]:
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (COUNT, 3072), np.uint8)
    return pixels, generator.integers(0, classes, COUNT, np.uint8)


def write_binary(path: Path, pixels: Bytes, *labels: Bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(np.column_stack([*labels, pixels]).tobytes())


def write_python2(path: Path, pixels: Bytes, labels: Bytes, key: bytes = b"labels") -> None:
    """Write the opcodes that Python 2's cPickle wrote into the official files (protocol 2, byte strings)."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    raw = pixels.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        + b"(K\x01"
        + b"".join(b"M" + struct.pack("<H", size) for size in pixels.shape)
        + b"\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + b"\x89T"
        + struct.pack("<I", len(raw))
        + raw
        + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    content = (
        b"\x80\x02}("
        + text(b"data")
        + array
        + text(key)
        + numbers
        + text(b"batch_label")
        + text(b"one")
        + b"u."
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_binary_layout_is_read_in_the_order_of_the_files(tmp_path: Path) -> None:
    parts = [draw(seed) for seed in range(5)]
    for number, (pixels, labels) in enumerate(parts):
        write_binary(tmp_path / "cifar-10-batches-bin" / f"data_batch_{number + 1}.bin", pixels, labels)
    images = load_set("cifar10", tmp_path, "train")
    assert isinstance(images, ImageSet)
    assert images.classes == CIFAR10_CLASSES
    assert torch.equal(
        images.images.flatten(1), torch.from_numpy(np.concatenate([part[0] for part in parts]))
    )
    assert images.labels.tolist() == np.concatenate([part[1] for part in parts]).tolist()
    within = load_set("cifar10", tmp_path / "cifar-10-batches-bin", "train")
    assert torch.equal(within.labels, images.labels)


def test_cifar100_takes_the_fine_label(tmp_path: Path) -> None:
    pixels, fine = draw(1, 100)
    write_binary(tmp_path / "cifar-100-binary" / "test.bin", pixels, fine // 5, fine)
    images = load_set("cifar100", tmp_path)
    assert images.labels.tolist() == fine.tolist()
    assert len(CIFAR100_CLASSES) == len(set(CIFAR100_CLASSES)) == 100


def test_floats_and_items_are_in_the_unit_interval(tmp_path: Path) -> None:
    pixels, labels = draw(2)
    write_binary(tmp_path / "cifar-10-batches-bin" / "test_batch.bin", pixels, labels)
    images = load_set("cifar10", tmp_path)
    assert isinstance(images, ImageSet)
    expected = torch.from_numpy(pixels).view(-1, 3, 32, 32).float() / 255
    torch.testing.assert_close(images.floats(), expected)
    torch.testing.assert_close(images.floats([5, 1]), expected[[5, 1]])
    torch.testing.assert_close(images[3][0], expected[3])
    assert images.subset(torch.tensor([5, 1])).labels.tolist() == [labels[5], labels[1]]


@pytest.mark.parametrize(
    ("name", "folder", "file"),
    [
        ("cifar10", "cifar-10-batches-py", "test_batch"),
        ("cifar100", "cifar-100-python", "test"),
    ],
)
def test_python_layout_equals_the_binary_one(name: str, folder: str, file: str, tmp_path: Path) -> None:
    pixels, labels = draw(3)
    write_python2(tmp_path / folder / file, pixels, labels, LAYOUTS[name].key.encode())
    images = load_set(name, tmp_path)
    assert isinstance(images, ImageSet)
    assert images.images.flatten(1).tolist() == pixels.tolist()
    assert images.labels.tolist() == labels.tolist()


@pytest.mark.parametrize("cut", [1, 3073, 5000])
def test_truncated_binary_files_are_refused(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    write_binary(path, *draw(5))
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ValueError, match=r"truncated"):
        load_set("cifar10", tmp_path)


def test_truncated_pickles_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    write_python2(path, *draw(5))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="is refused as a batch"):
        load_set("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0] * (COUNT - 1), "12 images but 11 labels"),
        ([0.5] * COUNT, "list of integers"),
        ([10] * COUNT, "labels must be from 0 to 9"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels: list[Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "test_batch").write_bytes(pickle.dumps({"data": draw(6)[0], "labels": labels}))
    with pytest.raises(ValueError, match=message):
        load_set("cifar10", tmp_path)


def test_missing_files_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="ttvd data get cifar10 --root"):
        load_set("cifar10", tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        load_set("cifar10", tmp_path / "nowhere")
    write_binary(tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin", *draw(0))
    with pytest.raises(FileNotFoundError, match=r"lacks data_batch_2\.bin"):
        load_set("cifar10", tmp_path, "train")


@pytest.fixture
def stacked(tmp_path: Path) -> tuple[Path, Bytes, Bytes]:
    """CIFAR-10-C of four images with one corruption."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (20, 32, 32, 3), np.uint8)
    labels = np.tile(np.array([3, 1, 4, 1], np.uint8), 5)
    (tmp_path / "CIFAR-10-C").mkdir()
    np.save(tmp_path / "CIFAR-10-C" / "fog.npy", images)
    np.save(tmp_path / "CIFAR-10-C" / "labels.npy", labels)
    return tmp_path, images, labels


def test_severities_are_stacked(stacked: tuple[Path, Bytes, Bytes]) -> None:
    root, images, _ = stacked
    for severity in range(1, 6):
        found = load_set("cifar10-c", root, corruption="fog", severity=severity)
        assert isinstance(found, ImageSet)
        expected = images[4 * (severity - 1) : 4 * severity].transpose(0, 3, 1, 2)
        assert found.images.numpy().tolist() == expected.tolist()
        assert found.labels.tolist() == [3, 1, 4, 1]
    other = load_set("stack", root / "CIFAR-10-C", corruption="fog", severity=2)
    assert other.classes is None


def test_bad_stacks_are_refused(stacked: tuple[Path, Bytes, Bytes]) -> None:
    root, images, labels = stacked
    folder = root / "CIFAR-10-C"
    with pytest.raises(ValueError, match=r"severities \[1, 2, 3, 4, 5\], got 6"):
        load_set("cifar10-c", root, corruption="fog", severity=6)
    with pytest.raises(FileNotFoundError, match="the corruptions there are: fog"):
        load_set("cifar10-c", root, corruption="frog")
    np.save(folder / "labels.npy", labels[:-1])
    with pytest.raises(ValueError, match="20 images but"):
        load_set("cifar10-c", root, corruption="fog")
    np.save(folder / "fog.npy", images[:-1])
    with pytest.raises(ValueError, match="cannot share equally"):
        load_set("cifar10-c", root, corruption="fog")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cifar11",), "did you mean 'cifar10'"),
        (("cifar10", ".", "dev"), "'train' or 'test'"),
        (("cifar10-c",), "needs the name of a corruption"),
    ],
)
def test_bad_requests_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_set(*arguments)


def test_corruptions_and_splits_are_for_the_sets_that_have_them() -> None:
    with pytest.raises(ValueError, match="has no corruption 'fog'"):
        load_set("cifar10", corruption="fog")
    with pytest.raises(ValueError, match="it is for testing"):
        load_set("imagenet-r", split="train")
