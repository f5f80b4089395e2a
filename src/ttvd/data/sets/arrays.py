"""Images from arrays: tensors, .npy and .npz files, torch data sets. Nothing that is read here can run code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ttvd.data.sets.imageset import ImageSet

AnyArray = npt.NDArray[Any]


def from_arrays(
    images: Tensor | npt.ArrayLike,
    labels: Tensor | npt.ArrayLike,
    *,
    classes: Sequence[str] | None = None,
    name: str = "images",
) -> ImageSet:
    """Make an image set of arrays.

    Args:
        images: (n, c, h, w), (n, h, w, c) or (n, h, w) with 1 or 3 channels; bytes, or floats in [0, 1], which are
            rounded to the nearest of 256 levels. Where both the second and the last size could be channels, the
            second is taken.
        labels: Integers (n,).
        classes: Names of the classes.
        name: For records and messages.

    Example:
        >>> from_arrays(torch.ones(4, 8, 8, 3), [0, 1, 0, 1]).images.shape
        torch.Size([4, 3, 8, 8])
    """
    numbers = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    if not np.issubdtype(numbers.dtype, np.integer):
        raise ValueError(f"{name}: labels must be integers, got {numbers.dtype}")
    pixels = _to_channels_first(_to_bytes(_to_tensor(images), name), name)
    names = None if classes is None else tuple(classes)
    return ImageSet(pixels, torch.from_numpy(numbers.astype(np.int64)), names, name)


def load_arrays(path: str | Path, labels: str | Path | None = None) -> ImageSet:
    """Load images from an .npz file with the arrays "images" and "labels", or from two .npy files.

    Args:
        path: The .npz file, or the .npy file of the images.
        labels: The .npy file of the labels; "labels.npy" beside the images unless given.
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
        dataset: Images are tensors, arrays or Pillow pictures of one size, in the forms of `from_arrays`.
        classes: Names of the classes; the data set's own `classes` unless given.
        name: For records and messages.
    """
    items = [dataset[position] for position in range(len(dataset))]
    if not items:
        raise ValueError(f"{name}: the data set is empty")
    images = [torch.as_tensor(np.array(image)) for image, _ in items]
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        raise ValueError(
            f"{name}: all images must have one size, got {sorted(shapes)[:3]}; resize them first"
        )
    known = getattr(dataset, "classes", None) if classes is None else classes
    labels = [int(label) for _, label in items]
    return from_arrays(torch.stack(images), labels, classes=known, name=name)


def read_npy(path: str | Path) -> AnyArray:
    """Map an .npy file into memory, read-only; only the parts that are used are read from the disk.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is truncated, no .npy file, or holds pickled objects, which are never loaded.
    """
    with _explained(path):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError(f"{path} is an archive of arrays (.npz), expected one array (.npy)")
    return array


def read_npz(path: str | Path, names: Sequence[str]) -> dict[str, AnyArray]:
    """Read arrays from an .npz file; raise as :func:`read_npy` does, or when a name is missing."""
    with _explained(path), np.load(path, allow_pickle=False) as archive:
        if isinstance(archive, np.ndarray):
            raise ValueError("it is one array (.npy)")
        missing = sorted(set(names) - set(archive.files))
        if missing:
            raise ValueError(f"it has no array {missing[0]!r}, only {archive.files}")
        return {name: archive[name] for name in names}


@contextmanager
def _explained(path: str | Path) -> Iterator[None]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        yield
    except (ValueError, EOFError, BadZipFile, KeyError) as error:
        # numpy's advice for pickled objects is to allow them, which is the last thing to do with a stranger's file.
        text = str(error)
        reason = (
            "it holds pickled objects, which are never loaded"
            if "ickle" in text or "objects" in text
            else text
        )
        raise ValueError(f"{path} cannot be read as plain arrays: {reason or 'it is empty'}") from error


def _to_tensor(images: Tensor | npt.ArrayLike) -> Tensor:
    if isinstance(images, Tensor):
        return images
    array = np.asarray(images)
    if array.dtype.kind not in "uif":
        raise ValueError(f"images must be bytes or floats in [0, 1], got {array.dtype}")
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
