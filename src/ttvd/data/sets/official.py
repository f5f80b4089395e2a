"""CIFAR-10 and CIFAR-100, MNIST, Fashion-MNIST and MNIST-C, from their official files.

CIFAR has a binary and a Python layout (https://www.cs.toronto.edu/~kriz/cifar.html); the binary one is preferred.
MNIST and Fashion-MNIST are idx files, gzipped or not. MNIST-C is .npy files.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ttvd.data.sets.arrays import from_arrays, read_npy
from ttvd.data.sets.base import ImageSet, Split, find_folder
from ttvd.data.sets.unpickle import read_batch

Bytes = npt.NDArray[np.uint8]
_PIXELS = 3 * 32 * 32

_NAMES_10 = "airplane automobile bird cat deer dog frog horse ship truck"
_NAMES_100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
CIFAR10_CLASSES: Final = tuple(_NAMES_10.split())
CIFAR100_CLASSES: Final = tuple(_NAMES_100.split())

DIGITS: Final = tuple("0123456789")
_NAMES_FASHION = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
FASHION: Final = tuple(_NAMES_FASHION.split(","))
FOLDERS: Final = {"mnist": ("mnist", "MNIST/raw"), "fashion-mnist": ("fashion-mnist", "FashionMNIST/raw")}
"""Folders of each set: ours first, then torchvision's."""

_CLASSES = {"mnist": DIGITS, "fashion-mnist": FASHION}
_STEMS = {"train": "train", "test": "t10k"}
_IDX_OF_BYTES = b"\0\0\x08"
_MAX_BYTES = 1 << 32


@dataclass(frozen=True)
class Layout:
    """How CIFAR-10 or CIFAR-100 lies on the disk.

    Attributes:
        binary: Folder of the binary files.
        python: Folder of the pickled files.
        files: Names of the files of each split, without the suffix of the binary ones.
        records: Number of images in each file of a split.
        label_bytes: Number of labels before the pixels of a binary record; the last of them is the class.
        key: Name of the labels in a pickled file.
        classes: Names of the classes.
    """

    binary: str
    python: str
    files: Mapping[Split, tuple[str, ...]]
    records: Mapping[Split, int]
    label_bytes: int
    key: str
    classes: tuple[str, ...]


LAYOUTS: Final[dict[str, Layout]] = {
    "cifar10": Layout(
        "cifar-10-batches-bin",
        "cifar-10-batches-py",
        {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
        {"train": 10_000, "test": 10_000},
        label_bytes=1,
        key="labels",
        classes=CIFAR10_CLASSES,
    ),
    "cifar100": Layout(
        "cifar-100-binary",
        "cifar-100-python",
        {"train": ("train",), "test": ("test",)},
        {"train": 50_000, "test": 10_000},
        label_bytes=2,
        key="fine_labels",
        classes=CIFAR100_CLASSES,
    ),
}


def load_cifar(name: str, root: str | Path, split: Split = "test") -> ImageSet:
    """Load CIFAR-10 or CIFAR-100 as one tensor.

    Args:
        name: "cifar10" or "cifar100" (its 100 fine classes).
        root: Folder that holds the official folder, or that folder itself.
        split: "train" or "test".
    """
    layout = LAYOUTS[name]
    files = layout.files[split]
    folder = find_folder(
        root,
        {layout.binary: [f"{file}.bin" for file in files], layout.python: list(files)},
        hint=f"ttvd data get {name} --root {root}",
    )
    binary = (folder / f"{files[0]}.bin").is_file()
    count = layout.records[split]
    images = np.empty((len(files) * count, 3, 32, 32), np.uint8)
    labels = np.empty(len(images), np.int64)
    for number, file in enumerate(files):
        rows = slice(number * count, (number + 1) * count)
        pixels, numbers = (
            _read_binary(folder / f"{file}.bin", layout.label_bytes, count)
            if binary
            else _read_python(folder / file, layout.key, count)
        )
        images[rows] = pixels.reshape(-1, 3, 32, 32)
        labels[rows] = numbers
    return ImageSet(torch.from_numpy(images), torch.from_numpy(labels), layout.classes, name)


def _read_binary(path: Path, label_bytes: int, count: int) -> tuple[Bytes, Bytes]:
    size = count * (label_bytes + _PIXELS)
    found = path.stat().st_size
    if found != size:
        raise ValueError(f"{path} has {found:,} bytes, expected {size:,}: it is truncated or another file")
    records = np.fromfile(path, np.uint8).reshape(count, -1)
    return records[:, label_bytes:], records[:, label_bytes - 1]


def _read_python(path: Path, key: str, count: int) -> tuple[Bytes, npt.NDArray[np.int64]]:
    batch = read_batch(path)
    pixels, labels = batch.get("data"), batch.get(key)
    if not isinstance(pixels, np.ndarray) or pixels.shape != (count, _PIXELS):
        shape = getattr(pixels, "shape", None)
        raise ValueError(f"{path}: 'data' must be bytes of shape {(count, _PIXELS)}, got {shape}")
    if not isinstance(labels, list) or any(type(label) is not int for label in labels):
        raise ValueError(f"{path}: {key!r} must be a list of integers")
    if len(labels) != count:
        raise ValueError(f"{path}: {count} images but {len(labels)} labels")
    return pixels, np.array(labels, np.int64)


def load_mnist(name: str, root: str | Path, split: Split = "test") -> ImageSet:
    """Load MNIST or Fashion-MNIST as one tensor.

    Args:
        name: "mnist" or "fashion-mnist".
        root: Folder of the four idx files, or the folder above it.
        split: "train" or "test".
    """
    stem = _STEMS[split]
    images, labels = f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"
    names = ([f"{images}{end}", f"{labels}{end}"] for end in (".gz", ""))
    for files in names:
        for place in (*FOLDERS[name], "."):
            folder = Path(root, place)
            if all((folder / file).is_file() for file in files):
                pixels, numbers = read_idx(folder / files[0]), read_idx(folder / files[1])
                return from_arrays(pixels, numbers, classes=_CLASSES[name], name=name)
    raise FileNotFoundError(
        f"no {images} and {labels} (or .gz) in {Path(root, FOLDERS[name][0])} or {root}; "
        f"`ttvd data get {name} --root {root}` gets them"
    )


def load_mnist_c(root: str | Path, corruption: str, split: Split = "test") -> ImageSet:
    """Load one corruption of MNIST-C (https://zenodo.org/record/3239543), which has no severities.

    Args:
        root: Folder that holds `mnist_c`, or `mnist_c` itself.
        corruption: Name of a folder; "identity" is the clean set.
        split: "train" or "test".
    """
    files = [f"{corruption}/{split}_{kind}.npy" for kind in ("images", "labels")]
    folder = find_folder(root, {"mnist_c": files}, hint=f"ttvd data get mnist-c --root {root}")
    images, labels = (read_npy(folder / file) for file in files)
    return from_arrays(images, labels, classes=DIGITS, name="mnist-c")


def read_idx(path: str | Path) -> npt.NDArray[np.uint8]:
    """Read an array of bytes from an idx file; a name that ends in .gz is unpacked.

    Raises:
        ValueError: The file is truncated, damaged or too long, or holds another type.
    """
    path = Path(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            magic = file.read(4)
            if magic[:3] != _IDX_OF_BYTES or len(magic) < 4 or not 1 <= magic[3] <= 4:
                begin = magic.hex(" ") or "nothing"
                raise ValueError(f"{path} is not an idx file of bytes: it begins with {begin}")
            sizes = file.read(4 * magic[3])
            if len(sizes) < 4 * magic[3]:
                raise ValueError(f"{path} is truncated within its header")
            shape = struct.unpack(f">{magic[3]}I", sizes)
            count = int(np.prod(shape, dtype=object))
            if count > _MAX_BYTES:
                raise ValueError(f"{path} is damaged: its header announces the shape {shape}")
            content = file.read(count + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is truncated or damaged: {error}") from error
    if len(content) != count:
        relation = "fewer" if len(content) < count else "more"
        raise ValueError(f"{path} has {relation} bytes than the {count:,} of its shape {shape}")
    return np.frombuffer(content, np.uint8).reshape(shape)
