"""Images from arrays: tensors, .npy and .npz files, torch data sets, and stacks in the layout of CIFAR-10-C.

No file that is read here can run code.

A stack has one .npy file for each corruption, which holds the severities one after the other, and labels.npy. The
released CIFAR-10-C (https://zenodo.org/record/2535967) and CIFAR-100-C (https://zenodo.org/record/3555552) have the
severities 1 to 5. Stacks that `ttvd corrupt` wrote state theirs in the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ttvd.data.sets.base import ImageSet

AnyArray = npt.NDArray[Any]
SEVERITIES = (1, 2, 3, 4, 5)


def from_arrays(
    images: Tensor | npt.ArrayLike,
    labels: Tensor | npt.ArrayLike,
    *,
    classes: Sequence[str] | None = None,
    name: str = "images",
) -> ImageSet:
    """Make an image set from arrays.

    Args:
        images: Bytes or floats in [0, 1] of shape (n, c, h, w), (n, h, w, c) or (n, h, w), with 1 or 3 channels. Floats
            are rounded to the nearest of 256 levels. If the second and the last size could both be channels, the
            second is taken.
        labels: Integers (n,).
        classes: Names of the classes.
        name: Name of the set in records and messages.

    Example:
        >>> from_arrays(torch.ones(4, 8, 8, 3), [0, 1, 0, 1]).images.shape
        torch.Size([4, 3, 8, 8])
    """
    numbers = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    if not np.issubdtype(numbers.dtype, np.integer):
        raise ValueError(f"{name}: labels must be integers, got {numbers.dtype}")
    pixels = _to_channels_first(_to_bytes(_to_tensor(images, name), name), name)
    names = None if classes is None else tuple(classes)
    return ImageSet(pixels, torch.from_numpy(numbers.astype(np.int64)), names, name)


def load_arrays(path: str | Path, labels: str | Path | None = None) -> ImageSet:
    """Load images from an .npz file with the arrays "images" and "labels", or from two .npy files.

    Args:
        path: The .npz file, or the .npy file of the images.
        labels: The .npy file of the labels; "labels.npy" beside the images by default.
    """
    path = Path(path)
    if path.suffix == ".npz":
        arrays = read_npz(path, ("images", "labels"))
        return from_arrays(arrays["images"], arrays["labels"], name=path.stem)
    numbers = read_npy(labels or path.with_name("labels.npy"))
    return from_arrays(read_npy(path), numbers, name=path.stem)


def from_dataset(dataset: Any, *, classes: Sequence[str] | None = None, name: str = "images") -> ImageSet:
    """Read a torch map-style data set of (image, label) items into memory.

    Args:
        dataset: Data set whose images are tensors, arrays or Pillow images of one size, in the forms that `from_arrays`
            accepts.
        classes: Names of the classes; the attribute `classes` of the data set by default.
        name: Name of the set in records and messages.
    """
    items = [dataset[position] for position in range(len(dataset))]
    if not items:
        raise ValueError(f"{name}: the data set is empty")
    modes = {mode for image, _ in items if isinstance(mode := getattr(image, "mode", None), str)}
    if odd := modes - {"L", "RGB", "F"}:  # numbers of colours, or channels of other colours
        raise ValueError(
            f"{name}: Pillow images must have the mode L, RGB or F, got {sorted(odd)}; convert them first, such as by "
            "image.convert('RGB')"
        )
    images = [torch.as_tensor(np.array(image)) for image, _ in items]
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        raise ValueError(
            f"{name}: all images must have one size, got {sorted(shapes)[:3]}; resize them first"
        )
    known = getattr(dataset, "classes", None) if classes is None else classes
    labels = [int(label) for _, label in items]
    return from_arrays(torch.stack(images), labels, classes=known, name=name)


def load_stack(
    folder: str | Path,
    corruption: str,
    severity: int = 5,
    *,
    classes: Sequence[str] | None = None,
    name: str | None = None,
) -> ImageSet:
    """Load one corruption at one severity from a stack; only that part of the file is read.

    Args:
        folder: Folder of the .npy files.
        corruption: Name of a file, without its suffix.
        severity: One of the severities in the file, 1 to 5 in the released sets.
        classes: Names of the classes.
        name: Name of the set in records; the name of the folder by default.
    """
    folder = Path(folder)
    severities = _read_severities(folder)
    if severity not in severities:
        raise ValueError(f"{folder} has the severities {list(severities)}, got {severity!r}")
    path = folder / f"{corruption}.npy"
    if not path.is_file():
        known = sorted(file.stem for file in folder.glob("*.npy") if file.stem != "labels")
        raise FileNotFoundError(f"no {path}; the corruptions there are: {', '.join(known) or 'none'}")
    images, labels = read_npy(path), read_npy(folder / "labels.npy")
    if labels.ndim != 1 or len(images) != len(labels):
        raise ValueError(
            f"{path} has {len(images)} images but labels.npy has shape {labels.shape}; "
            "they do not belong together or one is truncated"
        )
    count, rest = divmod(len(images), len(severities))
    if rest:
        raise ValueError(
            f"{path} has {len(images)} images, which {len(severities)} severities cannot share equally"
        )
    start = severities.index(severity) * count
    rows = slice(start, start + count)
    return from_arrays(images[rows], labels[rows], classes=classes, name=name or folder.name)


def read_npy(path: str | Path) -> AnyArray:
    """Map an .npy file into memory, read-only; only the parts that are used are read from the disk.

    Raises:
        FileNotFoundError: The file does not exist, or is not a regular file.
        ValueError: The file is truncated, is not an .npy file, or holds pickled objects, which are never loaded.
    """
    with _explained(path):
        with open(path, "rb") as file:
            if file.read(4) == b"PK\3\4":
                raise ValueError("it is an archive of arrays (.npz), expected one array (.npy)")
        array: AnyArray = np.lib.format.open_memmap(path, mode="r")
    return array


def read_npz(path: str | Path, names: Sequence[str]) -> dict[str, AnyArray]:
    """Read arrays from an .npz file; raise like :func:`read_npy`, and if an array is missing."""
    with _explained(path), open(path, "rb") as file:
        archive = np.load(file, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ValueError("it is one array (.npy)")
        missing = sorted(set(names) - set(archive.files))
        if missing:
            raise ValueError(f"it has no array {missing[0]!r}, only {archive.files}")
        return {name: archive[name] for name in names}


@contextmanager
def _explained(path: str | Path) -> Iterator[None]:
    """Turn every exception inside into a ValueError; a damaged file can make numpy raise exceptions of any type."""
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"no file {path}" if not Path(path).exists() else f"{path} is not a regular file"
        )
    try:
        yield
    except Exception as error:
        # numpy advises to allow pickled objects, which nobody should do with a file from elsewhere.
        reason = str(error) or "it is empty"
        if "ickle" in reason or "objects" in reason:
            reason = "it holds pickled objects, which are never loaded"
        raise ValueError(f"{path} cannot be read as plain arrays: {reason}") from error


def check_pixel_type(dtype: np.dtype[Any], name: str) -> None:
    """Raise a ValueError that says how to convert an array, unless it holds bytes or floats."""
    if dtype == np.uint8 or dtype.kind == "f":
        return
    hint = (
        "; (images / 65535).astype('float32') converts 16 bits"
        if dtype.kind == "u" and dtype.itemsize == 2
        else ""
    )
    if not hint and dtype.kind in "ui":
        hint = "; images.astype('uint8') converts values from 0 to 255"
    if dtype.kind == "b":
        hint = "; images.astype('float32') converts them"
    raise ValueError(f"{name}: images must be bytes or floats in [0, 1], got {dtype}{hint}")


def _to_tensor(images: Tensor | npt.ArrayLike, name: str) -> Tensor:
    if isinstance(images, Tensor):
        return images
    array = np.asarray(images)
    check_pixel_type(array.dtype, name)
    if array.dtype.kind == "f" and (array.dtype.itemsize > 8 or not array.dtype.isnative):
        array = array.astype(np.float64)  # torch knows neither
    # A tensor must not share the memory of a read-only array or of a file.
    return torch.from_numpy(np.require(array, requirements=("C", "W", "E")))


def _to_bytes(images: Tensor, name: str) -> Tensor:
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise ValueError(f"{name}: images must be bytes or floats in [0, 1], got {images.dtype}")
    if images.numel():
        low, high = (float(bound) for bound in torch.aminmax(images))
        if not (low >= 0 and high <= 1):  # a NaN fails every comparison
            raise ValueError(f"{name}: float images must lie in [0, 1], got values from {low:g} to {high:g}")
    return images.mul(255).round().to(torch.uint8)


def _to_channels_first(images: Tensor, name: str) -> Tensor:
    if images.ndim == 3:
        images = images.unsqueeze(1)
    if images.ndim == 4 and images.shape[1] not in (1, 3) and images.shape[3] in (1, 3):
        images = images.permute(0, 3, 1, 2)
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(
            f"{name}: images must have shape (n, c, h, w), (n, h, w, c) or (n, h, w) with 1 or 3 channels, "
            f"got {tuple(images.shape)}"
        )
    return images.contiguous()


def _read_severities(folder: Path) -> tuple[int, ...]:
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        return SEVERITIES
    try:
        found = json.loads(manifest.read_text(encoding="utf-8"))["severities"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{manifest} is not a manifest of `ttvd corrupt`: {error}") from error
    if not isinstance(found, list) or not found or any(type(number) is not int for number in found):
        raise ValueError(f"{manifest}: severities must be a list of integers, got {found!r}")
    return tuple(found)
