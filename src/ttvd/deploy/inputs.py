"""Unlabelled images to predict: a folder, a list of files, or an array."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ttvd.data.sets.arrays import read_npy
from ttvd.data.sets.folder import SUFFIXES, read_image
from ttvd.data.sets.pictures import Interpolation, Preparation

OnUnreadable = Literal["stop", "skip"]
_AHEAD = 4  # batches that are read while one is used


@dataclass(frozen=True)
class Inputs:
    """Named images in a fixed order, read when they are asked for.

    Attributes:
        names: One for each image, as the predictions will call it.
        read: Gives an image by its position: float (c, h, w) in [0, 1].
        identity: Tells these images from others: their number, and a digest of their names or, of an array, of its
            shape and its ends.
    """

    names: Sequence[str]
    read: Callable[[int], Tensor]
    identity: str = ""

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Batch:
    """Images that arrived together.

    Attributes:
        positions: Of the images in the inputs.
        images: (b, c, h, w); None if no image of the batch can be used.
        unreadable: Positions and reasons of those that were left out.
    """

    positions: list[int]
    images: Tensor | None
    unreadable: list[tuple[int, str]]

    @property
    def stop(self) -> int:
        """Position after the last image of the batch."""
        return max([*self.positions, *(p for p, _ in self.unreadable)]) + 1


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
        path: A folder (all pictures below it, sorted by path), a ``.txt`` list (one path a line, relative to the list),
            or an ``.npy`` array (n, c, h, w), (n, h, w, c) or (n, h, w) of bytes or floats in [0, 1].
        resize: Length of the shorter side of pictures before cropping.
        crop: Side of the square cut from the centre of pictures.
        interpolation: Of the resizing.
        gray: Turn pictures into one channel.
    """
    if path.suffix == ".npy":
        return _open_array(path)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and not p.is_dir())
        names = [str(file.relative_to(path)) for file in files]
    elif path.suffix == ".txt":
        names = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        files = [path.parent / name for name in names]
    else:
        raise ValueError(f"{path} is no folder, .npy array or .txt list of files")
    if not files:
        raise ValueError(f"{path} holds no pictures ({', '.join(sorted(SUFFIXES))})")
    how = Preparation(resize, crop, interpolation)
    return Inputs(names, lambda i: _read_picture(files[i], how, gray), _identify(len(names), *names))


def _read_picture(path: Path, how: Preparation, gray: bool) -> Tensor:
    image = read_image(path, *how)
    # The weights of ITU-R 601, which Pillow uses too.
    return (
        (image * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(0, keepdim=True) if gray else image
    )


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
        image = image.float().div_(255) if image.dtype == torch.uint8 else image.float()
        return image[None] if array.ndim == 3 else image.permute(2, 0, 1) if last else image

    ends = (array[0].tobytes().hex(), array[-1].tobytes().hex())
    identity = _identify(len(array), str(array.shape), str(array.dtype), *ends)
    return Inputs([str(i) for i in range(len(array))], read, identity)


def _identify(images: int, *parts: str) -> str:
    digest = hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()
    return f"{images} images, {digest[:12]}"


def iterate_batches(
    inputs: Inputs, size: int, *, on_unreadable: OnUnreadable = "stop", start: int = 0, workers: int = 4
) -> Iterator[Batch]:
    """Batches in the order of the inputs; the next ones are read in threads while one is used.

    An image cannot be used if it cannot be decoded, holds values that are not finite, or has another size than the
    first one that could.

    Args:
        inputs: What to read.
        size: Images in a batch, those included that turn out to be unreadable.
        on_unreadable: ``"stop"`` raises, ``"skip"`` leaves the image out and says so in the batch.
        start: Position to begin with.
        workers: Threads that read.
    """
    if size < 1:
        raise ValueError(f"a batch needs at least 1 image, got {size}")
    shape: torch.Size | None = None
    with ThreadPoolExecutor(workers) as pool:
        ahead = iter(range(start, len(inputs)))
        waiting = [(p, pool.submit(inputs.read, p)) for p in islice(ahead, _AHEAD * size)]
        while waiting:
            now, waiting = waiting[:size], waiting[size:]
            waiting += [(p, pool.submit(inputs.read, p)) for p in islice(ahead, len(now))]
            batch, shape = _collate(now, shape, inputs, on_unreadable)
            yield batch


def _collate(
    items: list[tuple[int, Future[Tensor]]],
    shape: torch.Size | None,
    inputs: Inputs,
    on_unreadable: OnUnreadable,
) -> tuple[Batch, torch.Size | None]:
    """Make a batch of what could be read; returns the size that all images must have, once it is known."""
    good: list[tuple[int, Tensor]] = []
    bad: list[tuple[int, str]] = []
    for position, future in items:
        try:
            image = future.result()
            _check_image(image, shape)
        except (ValueError, OSError) as error:
            if on_unreadable == "stop":
                raise ValueError(
                    f"{inputs.names[position]}: {error} (--unreadable skip leaves such images out)"
                ) from error
            bad.append((position, str(error)))
            continue
        shape = image.shape
        good.append((position, image))
    images = torch.stack([image for _, image in good]) if good else None
    return Batch([p for p, _ in good], images, bad), shape


def _check_image(image: Tensor, shape: torch.Size | None) -> None:
    if shape is not None and image.shape != shape:
        raise ValueError(
            f"it has size {tuple(image.shape)} and the images before it {tuple(shape)}; resize and crop them"
        )
    if not bool(image.isfinite().all()):
        raise ValueError("it holds NaN or infinite values")
