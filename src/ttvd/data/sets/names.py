"""Sets by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ttvd.data.sets.arrays import from_arrays, load_arrays
from ttvd.data.sets.cifar import CIFAR10_CLASSES, CIFAR100_CLASSES, load_cifar
from ttvd.data.sets.folder import ImageFolder
from ttvd.data.sets.imagenet import load_imagenet, load_imagenet_c, load_imagenet_r
from ttvd.data.sets.imageset import ImageSet
from ttvd.data.sets.mnist import load_mnist, load_mnist_c
from ttvd.data.sets.places import find_folder
from ttvd.data.sets.stacks import load_stack

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Request:
    """What a user asked for, checked."""

    name: str
    root: Path
    split: Split
    corruption: str
    severity: int


def _load_digits(request: Request) -> ImageSet:
    from ttvd.data.digits import split_digits

    source, source_labels, stream, stream_labels = split_digits()
    images, labels = (source, source_labels) if request.split == "train" else (stream, stream_labels)
    return from_arrays(images, labels, classes=tuple("0123456789"), name="digits")


def _load_cifar(request: Request) -> ImageSet:
    return load_cifar(request.name, request.root, request.split)


def _load_cifar_c(request: Request) -> ImageSet:
    folder, classes = {
        "cifar10-c": ("CIFAR-10-C", CIFAR10_CLASSES),
        "cifar100-c": ("CIFAR-100-C", CIFAR100_CLASSES),
    }[request.name]
    hint = f"ttvd data get {request.name} --root {request.root}"
    home = find_folder(request.root, {folder: ["labels.npy"]}, hint)
    return load_stack(home, request.corruption, request.severity, classes=classes, name=request.name)


def _load_stack(request: Request) -> ImageSet:
    return load_stack(request.root, request.corruption, request.severity)


def _load_mnist(request: Request) -> ImageSet:
    return load_mnist(request.name, request.root, request.split)


def _load_mnist_c(request: Request) -> ImageSet:
    return load_mnist_c(request.root, request.corruption, request.split)


def _load_arrays(request: Request) -> ImageSet:
    if not request.root.is_dir():
        return load_arrays(request.root)
    names = ("images.npz", "images.npy")
    file = next((request.root / name for name in names if (request.root / name).is_file()), None)
    if file is None:
        raise FileNotFoundError(
            f"{request.root} has neither images.npz, with the arrays images and labels, nor images.npy and labels.npy"
        )
    return load_arrays(file)


def _load_imagenet(request: Request) -> ImageFolder:
    return load_imagenet(request.root, request.split)


def _load_imagenet_c(request: Request) -> ImageFolder:
    return load_imagenet_c(request.root, request.corruption, request.severity)


def _load_imagenet_r(request: Request) -> ImageFolder:
    return load_imagenet_r(request.root)


def _load_folder(request: Request) -> ImageFolder:
    return ImageFolder(request.root)


_LOADERS: Final[dict[str, Callable[[Request], ImageSet | ImageFolder]]] = {
    "digits": _load_digits,
    "cifar10": _load_cifar,
    "cifar100": _load_cifar,
    "cifar10-c": _load_cifar_c,
    "cifar100-c": _load_cifar_c,
    "mnist": _load_mnist,
    "fashion-mnist": _load_mnist,
    "mnist-c": _load_mnist_c,
    "imagenet": _load_imagenet,
    "imagenet-c": _load_imagenet_c,
    "imagenet-r": _load_imagenet_r,
    "folder": _load_folder,
    "stack": _load_stack,
    "arrays": _load_arrays,
}
SETS: Final = tuple(_LOADERS)
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
    """Load a set by its name.

    Args:
        name: One of `SETS`: "digits" (needs no files), the official sets, "folder" (class folders of pictures),
            "stack" (a folder in the layout of CIFAR-10-C) or "arrays" (an .npz or .npy file).
        root: Folder that holds the official files or their folder; for "arrays" the file, or a folder with images.npz
            or with images.npy and labels.npy.
        split: "test", or "train" for the sets that have one.
        corruption: For the corrupted sets ("...-c" and "stack").
        severity: For the corrupted sets but MNIST-C, which has none.

    Returns:
        An `ImageSet` in memory, or an `ImageFolder` for pictures on the disk.

    Example:
        >>> load_set("digits").labels.bincount()
        tensor([200, 200, 200, 200, 200, 200, 200, 200, 200, 200])
    """
    if name not in _LOADERS:
        near = difflib.get_close_matches(name, SETS, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown set {name!r}; did you mean {near!r}? Known: {', '.join(SETS)}")
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    if split == "train" and name in _TEST_ONLY:
        raise ValueError(f"{name} has no split, it is for testing; got split='train'")
    if (corruption is None) == (name in _CORRUPTED):
        wanted = (
            "needs the name of a corruption" if corruption is None else f"has no corruption {corruption!r}"
        )
        raise ValueError(f"{name} {wanted}; the corrupted sets are {', '.join(_CORRUPTED)}")
    return _LOADERS[name](Request(name, Path(root), split, corruption or "", severity))
