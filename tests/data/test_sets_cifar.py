"""CIFAR in all its layouts, the pickles that try more than to hold images, and damaged arrays."""

import copyreg
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ttvd.data.sets import ImageSet, from_arrays, from_dataset, load_arrays, load_set
from ttvd.data.sets.cifar import CIFAR10_CLASSES, CIFAR100_CLASSES, LAYOUTS
from ttvd.data.sets.unpickle import read_batch

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


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_batches_that_python_3_wrote_are_read_too(protocol: int, tmp_path: Path) -> None:
    pixels, labels = draw(4)
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({"data": pixels, "labels": labels.tolist()}, protocol))
    batch = read_batch(path)
    assert np.array_equal(batch["data"], pixels)
    assert batch["labels"] == labels.tolist()


class Smuggler:
    """Pickles into a call of any function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._call


MARKER = "smuggled"
PAYLOADS: dict[str, Any] = {
    "system": Smuggler(os.system, f"touch {MARKER}"),
    "exec": Smuggler(exec, f"open({MARKER!r}, 'w')"),
    "getattr": Smuggler(getattr, "", "join"),
    "open": Smuggler(open, MARKER, "w"),
    "numpy load": Smuggler(np.load, MARKER),
    "bytearray": Smuggler(bytearray, 10),
    "object array": np.array([Smuggler(os.system, f"touch {MARKER}")], object),
    "float array": np.ones(3),
    "wide integers": np.ones(3, np.int64),
    "complex number": 1j,
    "nested": {"data": [Smuggler(os.system, f"touch {MARKER}")]},
}


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("name", PAYLOADS)
def test_pickles_that_ask_for_more_are_refused(
    name: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("test_batch").write_bytes(pickle.dumps({"data": PAYLOADS[name]}, protocol))
    with pytest.raises(ValueError, match="is refused as a batch"):
        load_set("cifar10", tmp_path)
    assert not Path(MARKER).exists()


RAW = {
    "global by dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0fos.path.os.popen\x93.",
    "call of ndarray": b"\x80\x02cnumpy\nndarray\nK\x0a\x85R.",
    "instance of a stand-in": b"\x80\x02cnumpy\ndtype\n)\x81.",
    "change of a stand-in": b"\x80\x02cnumpy\ndtype\n}X\x01\x00\x00\x00aK\x01sb.",
    "slots of a stand-in": b"\x80\x02c_codecs\nencode\nN}X\x09\x00\x00\x00_functionNs\x86b.",
    "persistent identifier": b"\x80\x02K\x01Q.",
    "old-style instance": b"(cos\nsystem\nX\x04\x00\x00\x00trueo.",
    "array longer than its bytes": (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R(K\x01K\x09\x85cnumpy\ndtype\nU\x02u1\x85R\x89U\x02abtb."
    ),
    "dtype of objects by its state": b"\x80\x02cnumpy\ndtype\nU\x02u1\x85R(K\x03U\x01|NU\x01xNtb.",
    "foreign codec": b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.",
    "empty": b"",
    "no dictionary": b"\x80\x02].",
    "no pickle": b"hello",
}


@pytest.mark.parametrize("name", RAW)
def test_hand_made_pickles_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "batch"
    path.write_bytes(RAW[name])
    with pytest.raises(ValueError, match="is refused as a batch"):
        read_batch(path)


def test_extension_codes_do_not_get_past_the_names(tmp_path: Path) -> None:
    copyreg.add_extension("os", "getcwd", 240)
    try:
        content = pickle.dumps(os.getcwd, 2)
        assert pickle.loads(content) is os.getcwd  # noqa: S301 (fills the cache that the attack relies on)
        path = tmp_path / "batch"
        path.write_bytes(b"\x80\x02}X\x01\x00\x00\x00a\x82\xf0)Rs.")
        with pytest.raises(ValueError, match="is refused as a batch"):
            read_batch(path)
    finally:
        copyreg.remove_extension("os", "getcwd", 240)
        copyreg.clear_extension_cache()


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


@pytest.mark.parametrize("kind", ["objects", "pickle", "truncated", "header", "empty", "npz"])
def test_arrays_that_are_not_plain_are_refused(
    kind: str, stacked: tuple[Path, Bytes, Bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _, _ = stacked
    monkeypatch.chdir(root)
    path = root / "CIFAR-10-C" / "fog.npy"
    if kind == "objects":
        np.save(path, np.array([Smuggler(os.system, f"touch {MARKER}")], object), allow_pickle=True)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Smuggler(os.system, f"touch {MARKER}")))
    elif kind == "npz":
        with path.open("wb") as file:
            np.savez(file, a=np.zeros(1))
    else:
        size = {"truncated": -7, "header": 20, "empty": 0}[kind]
        path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"fog\.npy") as error:
        load_set("cifar10-c", root, corruption="fog")
    assert "allow_pickle" not in str(error.value)
    assert not Path(MARKER).exists()


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
