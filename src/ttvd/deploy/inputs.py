"""The images of a stream: a folder, a list of files or an array, in a fixed order."""

import codecs
import hashlib
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ttvd.data.decoding import MAX_PIXELS, check_pixels
from ttvd.data.loading import (
    SUFFIXES,
    Batch,
    Interpolation,
    OnUnreadable,
    Preparation,
    ReadImage,
    describe_skipped,
    list_image_files,
    load_batches,
    read_pixels,
    to_floats,
)
from ttvd.data.sets.arrays import check_pixel_type, read_npy

__all__ = ["Batch", "Inputs", "OnUnreadable", "iterate_batches", "open_inputs"]


@dataclass(frozen=True)
class Inputs:
    """Named images in a fixed order. An image is read when it is asked for.

    Attributes:
        names: Name of each image in the predictions.
        read: Reads an image by its position: uint8, or floating point in [0, 1], of shape (c, h, w).
        identity: Text that tells these images from others: their number, and a digest of their names or, for an array,
            of its shape, its first and its last image.
        skipped: What was left out of a folder: paths for each reason, such as a suffix.
            `ttvd.data.loading.describe_skipped` puts it into words.
    """

    names: Sequence[str]
    read: ReadImage
    identity: str = ""
    skipped: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)


def open_inputs(
    path: Path,
    *,
    resize: int | None = None,
    crop: int | None = None,
    interpolation: Interpolation = "bilinear",
    gray: bool = False,
    apply_orientation: bool = True,
    max_pixels: int = MAX_PIXELS,
    on_unreadable: OnUnreadable = "stop",
) -> Inputs:
    """Find the images at a path.

    Nothing is left out without being named. The files of a folder that do not have the suffix of an image are in
    `Inputs.skipped`. All others are images; one that cannot be used (a broken link, an empty file, a pipe) is an error
    when it is read, see :func:`iterate_batches`.

    Args:
        path: A folder (all image files below it, hidden ones too, sorted by path), a ``.txt`` list (UTF-8, one path a
            line, relative to the list; empty lines are ignored, and a path may come again), or an ``.npy`` array
            (n, c, h, w), (n, h, w, c) or (n, h, w) of bytes or floats in [0, 1].
        resize: Length of the shorter side of image files before cropping.
        crop: Side of the square that is cut from the centre of image files.
        interpolation: Interpolation of the resizing.
        gray: Convert image files to one channel.
        apply_orientation: Turn image files upright as their EXIF data say.
        max_pixels: Limit on the pixels of an image, before and after resizing; one with more cannot be used.
        on_unreadable: ``"stop"`` raises an error at a folder below ``path`` that cannot be read, ``"skip"`` leaves it
            out and names it in `Inputs.skipped`.

    Raises:
        OSError: The path or a folder below it cannot be read.
        ValueError: The path holds no images, or an array or a list that cannot be used.
    """
    kind = path.suffix.lower()
    skipped: Mapping[str, Sequence[str]] = {}
    if path.is_dir():
        found = list_image_files(path, on_unreadable)
        names, skipped = [str(name) for name in sorted(map(Path, found.paths))], found.skipped
        files = [path / name for name in names]
    elif kind == ".npy":
        return _open_array(path, max_pixels)
    elif kind == ".txt":
        names = _read_list(path)
        files = [path.parent / name for name in names]
    else:
        missing = "" if path.exists() else ", which does not exist"
        raise ValueError(f"expected a folder, an .npy array or a .txt list of files, got {path}{missing}")
    if not files:
        left_out = f"; {text}" if (text := describe_skipped(skipped)) else ""
        raise ValueError(f"{path} holds no image files ({', '.join(sorted(SUFFIXES))}){left_out}")
    how = Preparation(resize, crop, interpolation)

    def read(position: int) -> Tensor:
        pixels = read_pixels(
            files[position], *how, apply_orientation=apply_orientation, max_pixels=max_pixels
        )
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


def _read_list(path: Path) -> list[str]:
    """Read the lines of a list as they are: spaces belong to a name, and so do bytes that are not UTF-8."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a regular file" if path.exists() else f"no file {path}")
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if b"\0" in content or content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{path} is not a text file in UTF-8; save the list in UTF-8, one path a line")
    lines = (os.fsdecode(line.removesuffix(b"\r")) for line in content.split(b"\n"))
    return [line for line in lines if line.strip()]


def _open_array(path: Path, max_pixels: int) -> Inputs:
    array = read_npy(path)
    if array.ndim not in (3, 4) or array.size == 0:
        raise ValueError(
            f"{path} must hold images (n, c, h, w), (n, h, w, c) or (n, h, w), got {array.shape}"
        )
    check_pixel_type(array.dtype, str(path))
    last = array.ndim == 4 and array.shape[1] not in (1, 3) and array.shape[3] in (1, 3)
    height, width = array.shape[1:3] if last else array.shape[-2:]
    check_pixels(width, height, max_pixels, f"an image of {path}")

    def read(position: int) -> Tensor:
        values = array[position]
        if array.dtype != np.uint8:
            low, high = float(values.min()), float(values.max())
            if not 0 <= low <= high <= 1:  # a NaN fails every comparison
                raise ValueError(f"its values go from {low:g} to {high:g}, expected floats in [0, 1]")
        image = torch.from_numpy(np.array(values, np.uint8 if array.dtype == np.uint8 else np.float32))
        return image[None] if array.ndim == 3 else image.permute(2, 0, 1) if last else image

    ends = (array[0].tobytes().hex(), array[-1].tobytes().hex())
    identity = _identify(len(array), str(array.shape), str(array.dtype), *ends)
    return Inputs([str(i) for i in range(len(array))], read, identity)


def _identify(images: int, *parts: str) -> str:
    digest = hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()
    return f"{images} images, {digest[:12]}"
