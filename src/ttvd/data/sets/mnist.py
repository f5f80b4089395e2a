"""MNIST and Fashion-MNIST (idx files, gzipped or not) and MNIST-C (.npy files)."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from ttvd.data.sets.arrays import from_arrays, read_npy
from ttvd.data.sets.imageset import ImageSet
from ttvd.data.sets.places import find_folder

Split = Literal["train", "test"]

DIGITS: Final = tuple("0123456789")
FASHION: Final = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
FOLDERS: Final = {"mnist": ("mnist", "MNIST/raw"), "fashion-mnist": ("fashion-mnist", "FashionMNIST/raw")}
"""Our folder of each set first, then torchvision's."""

_CLASSES = {"mnist": DIGITS, "fashion-mnist": FASHION}
_STEMS = {"train": "train", "test": "t10k"}
_UNSIGNED_BYTES = 0x08
_MOST = 1 << 32


def load_mnist(name: str, root: str | Path, split: Split = "test") -> ImageSet:
    """Load MNIST or Fashion-MNIST as one tensor.

    Args:
        name: "mnist" or "fashion-mnist".
        root: Folder of the four idx files, or one above it.
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
        ValueError: The file is truncated, damaged, too long or holds another type.
    """
    path = Path(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            magic = file.read(4)
            if (
                len(magic) < 4
                or magic[:2] != b"\0\0"
                or magic[2] != _UNSIGNED_BYTES
                or not 1 <= magic[3] <= 4
            ):
                raise ValueError(
                    f"{path} is no idx file of bytes: it begins with {magic.hex(' ') or 'nothing'}"
                )
            sizes = file.read(4 * magic[3])
            if len(sizes) < 4 * magic[3]:
                raise ValueError(f"{path} is truncated within its header")
            shape = struct.unpack(f">{magic[3]}I", sizes)
            count = int(np.prod(shape, dtype=object))
            if count > _MOST:
                raise ValueError(f"{path} is damaged: its header announces the shape {shape}")
            content = file.read(count + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is truncated or damaged: {error}") from error
    if len(content) != count:
        relation = "fewer" if len(content) < count else "more"
        raise ValueError(f"{path} has {relation} bytes than the {count:,} of its shape {shape}")
    return np.frombuffer(content, np.uint8).reshape(shape)
