"""Labelled images: the official sets, arrays, folders of image files and torch data sets.

Every loader returns an `ImageSet` (bytes in memory) or an `ImageFolder` (decoded on demand). Both have `labels`,
`classes` and `floats(index)`, which gives floats in [0, 1]. Nothing is downloaded here; `ttvd data get` does that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ttvd.data.checks import check_choice
from ttvd.data.digits import split_digits
from ttvd.data.loading import Preparation as Preparation
from ttvd.data.loading import read_image as read_image
from ttvd.data.sets.arrays import from_arrays as from_arrays
from ttvd.data.sets.arrays import from_dataset as from_dataset
from ttvd.data.sets.arrays import load_arrays as load_arrays
from ttvd.data.sets.arrays import load_stack as load_stack
from ttvd.data.sets.base import ImageSet as ImageSet
from ttvd.data.sets.base import LabelledImages as LabelledImages
from ttvd.data.sets.base import Split as Split
from ttvd.data.sets.base import find_folder
from ttvd.data.sets.folder import ClassMap as ClassMap
from ttvd.data.sets.folder import ImageFolder as ImageFolder
from ttvd.data.sets.folder import find_classes as find_classes
from ttvd.data.sets.folder import load_imagenet, load_imagenet_c, load_imagenet_r
from ttvd.data.sets.folder import read_synsets as read_synsets
from ttvd.data.sets.official import CIFAR10_CLASSES, CIFAR100_CLASSES, DIGITS
from ttvd.data.sets.official import load_cifar as load_cifar
from ttvd.data.sets.official import load_mnist as load_mnist
from ttvd.data.sets.official import load_mnist_c as load_mnist_c

SETS: Final = (
    *("digits", "cifar10", "cifar100", "cifar10-c", "cifar100-c", "mnist", "fashion-mnist", "mnist-c"),
    *("imagenet", "imagenet-c", "imagenet-r", "folder", "stack", "arrays"),
)
"""Names that :func:`load_set` knows."""
_CORRUPTED = ("cifar10-c", "cifar100-c", "mnist-c", "imagenet-c", "stack")
_TEST_ONLY = ("cifar10-c", "cifar100-c", "imagenet-c", "imagenet-r", "folder", "stack", "arrays")


def load_set(
    name: str,
    root: str | Path = ".",
    split: Split = "test",
    *,
    corruption: str | None = None,
    severity: int = 5,
) -> ImageSet | ImageFolder:
    """Load a data set by its name.

    Args:
        name: One of `SETS`: "digits" (needs no files), an official set, "folder" (class folders of image files),
            "stack" (a folder in the layout of CIFAR-10-C) or "arrays" (an .npz or .npy file).
        root: Folder that holds the official files or their folder; for "arrays" the file, or a folder with images.npz
            or with images.npy and labels.npy.
        split: "test", or "train" for the sets that have a training split.
        corruption: Name of the corruption, for the corrupted sets ("...-c" and "stack").
        severity: Severity of the corruption; MNIST-C has none.

    Returns:
        An `ImageSet` in memory, or an `ImageFolder` for image files.

    Example:
        >>> load_set("digits").labels.bincount()
        tensor([200, 200, 200, 200, 200, 200, 200, 200, 200, 200])
    """
    _check_request(name, split, corruption)
    root = Path(root)
    if corruption is not None:
        return _load_corrupted(name, root, split, corruption, severity)
    match name:
        case "digits":
            return _load_digits(split)
        case "cifar10" | "cifar100":
            return load_cifar(name, root, split)
        case "mnist" | "fashion-mnist":
            return load_mnist(name, root, split)
        case "imagenet":
            return load_imagenet(root, split)
        case "imagenet-r":
            return load_imagenet_r(root)
        case "folder":
            return ImageFolder(root)
        case _:
            return _load_arrays(root)


def _check_request(name: str, split: Split, corruption: str | None) -> None:
    check_choice(name, SETS, "data set")
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    if split == "train" and name in _TEST_ONLY:
        raise ValueError(f"{name} has no training split, it is for testing; got split='train'")
    if corruption is None and name in _CORRUPTED:
        raise ValueError(f"{name} needs the name of a corruption")
    if corruption is not None and name not in _CORRUPTED:
        raise ValueError(f"{name} has no corruption {corruption!r}; corrupted sets: {', '.join(_CORRUPTED)}")


def _load_corrupted(
    name: str, root: Path, split: Split, corruption: str, severity: int
) -> ImageSet | ImageFolder:
    match name:
        case "cifar10-c" | "cifar100-c":
            small = name == "cifar10-c"
            folder, classes = ("CIFAR-10-C", CIFAR10_CLASSES) if small else ("CIFAR-100-C", CIFAR100_CLASSES)
            home = find_folder(root, {folder: ["labels.npy"]}, f"ttvd data get {name} --root {root}")
            return load_stack(home, corruption, severity, classes=classes, name=name)
        case "mnist-c":
            return load_mnist_c(root, corruption, split)
        case "imagenet-c":
            return load_imagenet_c(root, corruption, severity)
        case _:
            return load_stack(root, corruption, severity)


def _load_digits(split: Split) -> ImageSet:
    source, source_labels, stream, stream_labels = split_digits()
    images, labels = (source, source_labels) if split == "train" else (stream, stream_labels)
    return from_arrays(images, labels, classes=DIGITS, name="digits")


def _load_arrays(root: Path) -> ImageSet:
    if not root.is_dir():
        return load_arrays(root)
    for file in (root / "images.npz", root / "images.npy"):
        if file.is_file():
            return load_arrays(file)
    raise FileNotFoundError(
        f"{root} has neither images.npz, with the arrays images and labels, nor images.npy and labels.npy"
    )
