"""The images of a stream: a folder, a list of files or an array, in a fixed order."""

import hashlib
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ttvd.data.loading import (
    SUFFIXES,
    Batch,
    Interpolation,
    OnUnreadable,
    Preparation,
    ReadImage,
    list_image_files,
    load_batches,
    read_pixels,
    to_floats,
)
from ttvd.data.sets.arrays import read_npy

__all__ = ["Batch", "Inputs", "OnUnreadable", "iterate_batches", "open_inputs"]


@dataclass(frozen=True)
class Inputs:
    """Named images in a fixed order. An image is read when it is asked for.

    Attributes:
        names: Name of each image in the predictions.
        read: Reads an image by its position: uint8, or floating point in [0, 1], of shape (c, h, w).
        identity: Text that tells these images from others: their number, and a digest of their names or, for an array,
            of its shape, its first and its last image.
        skipped: Number of files of a folder that are not images, by suffix; see `ttvd.data.loading.describe_skipped`.
    """

    names: Sequence[str]
    read: ReadImage
    identity: str = ""
    skipped: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.names)


def open_inputs(
    path: Path,
    *,
    resize: int | None = None,
    crop: int | None = None,
    interpolation: Interpolation = "bilinear",
    gray: bool = False,
) -> Inputs:
    """Find the images at a path.

    Args:
        path: A folder (all image files below it, sorted by path), a ``.txt`` list (one path a line, relative to the
            list), or an ``.npy`` array (n, c, h, w), (n, h, w, c) or (n, h, w) of bytes or floats in [0, 1].
        resize: Length of the shorter side of image files before cropping.
        crop: Side of the square that is cut from the centre of image files.
        interpolation: Interpolation of the resizing.
        gray: Convert image files to one channel.
    """
    skipped: Counter[str] = Counter()
    if path.suffix == ".npy":
        return _open_array(path)
    if path.is_dir():
        found = list_image_files(path)
        names, skipped = [str(name) for name in sorted(map(Path, found.paths))], found.skipped
        files = [path / name for name in names]
    elif path.suffix == ".txt":
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # a byte order mark is no part of a name
        names = [line.strip() for line in lines if line.strip()]
        files = [path.parent / name for name in names]
    else:
        raise ValueError(f"expected a folder, an .npy array or a .txt list of files, got {path}")
    if not files:
        raise ValueError(f"{path} holds no image files ({', '.join(sorted(SUFFIXES))})")
    how = Preparation(resize, crop, interpolation)

    def read(position: int) -> Tensor:
        pixels = read_pixels(files[position], *how)
        return _to_gray(to_floats(pixels)) if gray else pixels

    return Inputs(names, read, _identify(len(names), *names), skipped)


def iterate_batches(
    inputs: Inputs,
    size: int,
    *,
    on_unreadable: OnUnreadable = "stop",
    start: int = 0,
    shape: Sequence[int] | None = None,
    workers: int | None = None,
) -> Generator[Batch, None, None]:
    """Yield batches in the order of the inputs; threads read the next ones while one is used.

    Args:
        inputs: Images to read.
        size: Number of images in a batch, including those that turn out to be unreadable.
        on_unreadable: ``"stop"`` raises an error, ``"skip"`` leaves the image out and records it in the batch.
        start: Position of the first image.
        shape: Shape (c, h, w) that every image must have; by default, the shape of the first image.
        workers: Number of reading threads; one for each processor by default.
    """
    return load_batches(
        inputs.read,
        range(start, len(inputs)),
        size,
        shape=shape,
        names=inputs.names,
        on_unreadable=on_unreadable,
        workers=workers,
    )


def _to_gray(image: Tensor) -> Tensor:
    # The weights of ITU-R 601, which Pillow uses too.
    return (image * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(0, keepdim=True)


def _open_array(path: Path) -> Inputs:
    array = read_npy(path)
    if array.ndim not in (3, 4) or len(array) == 0:
        raise ValueError(
            f"{path} must hold images (n, c, h, w), (n, h, w, c) or (n, h, w), got {array.shape}"
        )
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"{path} must hold bytes or floats in [0, 1], got {array.dtype}")
    last = array.ndim == 4 and array.shape[1] not in (1, 3) and array.shape[3] in (1, 3)

    def read(position: int) -> Tensor:
        image = torch.from_numpy(np.array(array[position]))
        image = image if image.dtype == torch.uint8 else image.float()
        return image[None] if array.ndim == 3 else image.permute(2, 0, 1) if last else image

    ends = (array[0].tobytes().hex(), array[-1].tobytes().hex())
    identity = _identify(len(array), str(array.shape), str(array.dtype), *ends)
    return Inputs([str(i) for i in range(len(array))], read, identity)


def _identify(images: int, *parts: str) -> str:
    digest = hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()
    return f"{images} images, {digest[:12]}"
