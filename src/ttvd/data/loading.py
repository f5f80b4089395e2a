"""The image pipeline: find image files, decode them, resize and crop them, and load them in batches.

Everything in ttvd that reads image files does it here: data sets, benchmarks, the estimation of sites and `ttvd adapt`.

Batches are decoded by threads, not by processes. Decoding and resizing release the interpreter lock, no pixel has to
cross between processes, and benchmark workers, which may not start processes of their own, can start threads.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self, get_args

import numpy as np
import torch
from torch import Tensor

from ttvd.data.decoding import MAX_PIXELS, check_pixels, decode, is_turned, open_picture
from ttvd.data.decoding import require_pillow as require_pillow

SUFFIXES = frozenset((".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
"""Suffixes of the files of a folder that are read as images; they are torchvision's."""
THREAD_NAME = "ttvd-decode"
_MAX_DECODERS = 8

Interpolation = Literal["bilinear", "bicubic"]
OnUnreadable = Literal["stop", "skip"]
Skipped = dict[str, list[str]]
"""Paths that were left out, for each reason: a suffix, or words that follow a number."""
ReadImage = Callable[[int], Tensor]
"""Reads one image by its position: uint8, or floating point in [0, 1], of shape (c, h, w)."""


# Files


class ImageFiles(NamedTuple):
    """The image files below a folder.

    Attributes:
        paths: Paths relative to the folder, folder by folder and sorted, which is torchvision's order.
        skipped: What was left out; :func:`describe_skipped` puts it into words.
    """

    paths: list[str]
    skipped: Skipped


def list_image_files(folder: str | Path, on_unreadable: OnUnreadable = "stop") -> ImageFiles:
    """List the files below a folder that have the suffix of an image, and name everything else.

    Hidden files are listed like others. Links to folders are followed, and no folder is entered twice. Whatever has
    the suffix of an image is listed, even a broken link, a pipe or an empty file: to read it is an error that names
    it.

    Args:
        folder: The folder.
        on_unreadable: "stop" raises an error at a folder that cannot be read, "skip" leaves it out and names it.

    Raises:
        OSError: The folder cannot be read, or one below it and `on_unreadable` is "stop".
    """
    paths: list[str] = []
    skipped: Skipped = {}
    for place, names in sorted(_walk(Path(folder), on_unreadable, skipped)):
        for name in sorted(names):
            path = os.path.relpath(os.path.join(place, name), folder)
            suffix = os.path.splitext(name)[1].lower()
            if suffix in SUFFIXES:
                paths.append(path)
            else:
                skipped.setdefault(suffix or "without a suffix", []).append(path)
    return ImageFiles(paths, skipped)


def describe_skipped(skipped: Mapping[str, Sequence[str]], names: int = 3) -> str:
    """Say what was left out: the number for each reason, and the first names; return an empty string for nothing.

    Example:
        >>> describe_skipped({".txt": ["notes.txt"], ".gif": ["a.gif", "b.gif"], "without a suffix": ["README"]}, 1)
        'left out: 2 .gif (a.gif, ...), 1 .txt (notes.txt), 1 without a suffix (README)'
    """
    parts = []
    for reason, found in sorted(skipped.items(), key=lambda item: (-len(item[1]), item[0])):
        # A terminal must not obey what a name says.
        shown = [name if name.isprintable() else ascii(name)[1:-1] for name in found[:names]]
        more = ["..."] if len(found) > names else []
        parts.append(f"{len(found)} {reason} ({', '.join([*shown, *more])})")
    return f"left out: {', '.join(parts)}" if parts else ""


def _walk(top: Path, on_unreadable: OnUnreadable, skipped: Skipped) -> Iterator[tuple[str, list[str]]]:
    """Yield folders and the names of their files; of a folder and a link to it, the folder is taken."""

    def handle(error: OSError) -> None:
        if on_unreadable == "stop" or os.path.abspath(error.filename) == os.path.abspath(top):
            raise error
        name = f"{os.path.relpath(error.filename, top)}: {error.strerror}"
        skipped.setdefault("unreadable", []).append(name)

    home = top.resolve()
    visited = {str(home), *map(str, home.parents)}
    for folder, below, files in os.walk(top, followlinks=True, onerror=handle):
        yield folder, files
        inner = sorted((os.path.islink(path := os.path.join(folder, name)), name, path) for name in below)
        below.clear()
        for _, name, path in inner:
            if (real := os.path.realpath(path)) not in visited:
                visited.add(real)
                below.append(name)
            else:
                skipped.setdefault("listed elsewhere", []).append(os.path.relpath(path, top))


# One image


class Preparation(NamedTuple):
    """How an image file becomes the square that a model was evaluated on.

    Attributes:
        resize: Length of the shorter side before cropping; None for no resizing.
        crop: Side of the square that is cut from the centre; None for no cropping.
        interpolation: Interpolation of the resizing.

    Example:
        >>> Preparation.from_timm({"input_size": (3, 224, 224), "crop_pct": 0.9, "interpolation": "bicubic"})
        Preparation(resize=248, crop=224, interpolation='bicubic')
    """

    resize: int | None = 256
    crop: int | None = 224
    interpolation: Interpolation = "bilinear"

    @classmethod
    def from_timm(cls, config: Mapping[str, Any]) -> Preparation:
        """Return the preparation that timm states for a model.

        Args:
            config: The result of `timm.data.resolve_model_data_config(model)`. Its mean and standard deviation belong
                into the model, as a `ttvd.nn.normalize.Normalize` before it.
        """
        _, height, width = config["input_size"]
        mode = config.get("crop_mode", "center")
        interpolation = config.get("interpolation", "bilinear")
        if height != width or mode != "center" or interpolation not in get_args(Interpolation):
            raise ValueError(
                "only a centred square with bilinear or bicubic resizing can be prepared, this model expects "
                f"{height} x {width}, crop mode {mode!r}, {interpolation}"
            )
        return cls(math.floor(height / config.get("crop_pct", 0.875)), height, interpolation)


def read_image(
    path: str | Path,
    resize: int | None = 256,
    crop: int | None = 224,
    interpolation: Interpolation = "bilinear",
    *,
    apply_orientation: bool = False,
    max_pixels: int = MAX_PIXELS,
) -> Tensor:
    """Decode an image file into a float32 tensor (3, h, w) in [0, 1].

    The shorter side is resized, then the centre is cut out: the preparation behind published accuracies.

    Args:
        path: A file of one of the formats in `ttvd.data.decoding.FORMATS`. The first frame of several is taken.
        resize: Length of the shorter side before cropping; None for no resizing.
        crop: Side of the square that is cut from the centre; None for no cropping.
        interpolation: Interpolation of the resizing.
        apply_orientation: Turn the image upright as its EXIF data say. By default they are ignored, as torchvision and
            timm ignore them, so that published accuracies are met.
        max_pixels: Limit on the pixels of the image, before and after resizing.

    Raises:
        OSError: The file does not exist or cannot be opened.
        ValueError: The file cannot be used: it is truncated or not an image, has pixels of a kind whose scale is
            unknown, has too many pixels, or is smaller than the crop.
    """
    pixels = read_pixels(
        path, resize, crop, interpolation, apply_orientation=apply_orientation, max_pixels=max_pixels
    )
    return to_floats(pixels)


def read_pixels(
    path: str | Path,
    resize: int | None = 256,
    crop: int | None = 224,
    interpolation: Interpolation = "bilinear",
    *,
    apply_orientation: bool = False,
    max_pixels: int = MAX_PIXELS,
) -> Tensor:
    """Decode an image file into a tensor (3, h, w); otherwise like :func:`read_image`.

    Returns:
        uint8, or float32 in [0, 1] for gray images with more than 8 bits.
    """
    with open_picture(path, max_pixels) as picture:
        image = decode(picture, apply_orientation=apply_orientation)
        pixels = _prepare(image, Preparation(resize, crop, interpolation), max_pixels)
    # numpy, because torch would start its own threads for an image of this size in every decoding thread.
    if pixels.ndim == 2:
        return torch.from_numpy(np.repeat(pixels[None], 3, axis=0))
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def read_size(
    path: str | Path,
    resize: int | None = None,
    *,
    apply_orientation: bool = False,
    max_pixels: int = MAX_PIXELS,
) -> tuple[int, int]:
    """Return the width and the height of an image after resizing; only the header of the file is read."""
    with open_picture(path, max_pixels) as picture:
        width, height = picture.size
        turned = apply_orientation and is_turned(picture)
    return _fit((height, width) if turned else (width, height), resize)


def to_floats(pixels: Tensor) -> Tensor:
    """Convert uint8 values to float32 in [0, 1], with the same result on every device; keep floating point values.

    Example:
        >>> to_floats(torch.tensor([0, 51, 255], dtype=torch.uint8)).tolist()
        [0.0, 0.20000000298023224, 1.0]
    """
    if pixels.is_floating_point():
        return pixels
    # CUDA multiplies by the rounded inverse of a Python number; it really divides by a tensor.
    return pixels.float().div_(torch.full((), 255.0, device=pixels.device))


def stack_images(images: Sequence[Tensor], *, pin_memory: bool = False) -> Tensor:
    """Stack images of one shape: as uint8 if all of them are, else as float32 in [0, 1]."""
    if len(shapes := {tuple(image.shape) for image in images}) > 1:
        raise ValueError(
            f"the images of a batch have different shapes (c, h, w): {sorted(shapes)[:3]}; resize and crop them"
        )
    if any(image.dtype != torch.uint8 for image in images):
        images = [to_floats(image) for image in images]
    shape = (len(images), *images[0].shape)
    return torch.stack(list(images), out=torch.empty(shape, dtype=images[0].dtype, pin_memory=pin_memory))


def _fit(size: tuple[int, int], resize: int | None) -> tuple[int, int]:
    width, height = size
    short = min(size)
    return size if resize in (None, short) else (resize * width // short, resize * height // short)


def _prepare(image: Any, how: Preparation, max_pixels: int) -> Any:
    from PIL import Image

    crop = how.crop
    width, height = _fit(image.size, how.resize)
    if (width, height) != image.size:
        check_pixels(width, height, max_pixels, "resized, it")  # a narrow strip can become huge
        image = image.resize((width, height), Image.Resampling[how.interpolation.upper()])
    if crop is not None and (width, height) != (crop, crop):
        if min(width, height) < crop:
            raise ValueError(f"it has {width} x {height} pixels, too few for a crop of {crop}; resize first")
        left, top = round((width - crop) / 2), round((height - crop) / 2)
        image = image.crop((left, top, left + crop, top + crop))
    pixels = np.array(image)
    return pixels.clip(0, 1) if image.mode == "F" else pixels  # bicubic interpolation overshoots


# Batches


class ImageReader(Protocol):
    """Images that are read one at a time, such as an `ImageFolder`; several threads read at once."""

    def pixels(self, position: int) -> Tensor:
        """Read one image of shape (c, h, w): uint8, or float32 in [0, 1]."""


Request = tuple[ImageReader, Tensor]
"""A batch to load: the images, and the positions of those that are wanted."""


def count_decoders() -> int:
    """Return the default number of decoding threads: one for each usable processor, at most 8."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MAX_DECODERS, usable)


def prefetch(
    requests: Iterable[Request],
    device: torch.device | str = "cpu",
    *,
    workers: int | None = None,
    ahead: int = 4,
) -> Generator[Tensor, None, None]:
    """Yield batches of images as float32 (b, c, h, w) in [0, 1] on a device, in the order of the requests.

    The values are those of `ImageFolder.floats`, bit for bit. An image that cannot be read raises the same error as
    there, when its batch is due. Closing the generator stops the threads.

    Images travel as bytes and become floats on the device. A CUDA device receives them from pinned memory, on a stream
    of their own, while it works on the batch before. The decoding threads never call CUDA, so they cannot disturb a
    graph that is being recorded.

    Args:
        requests: One request for each batch. Requests are drawn when the decoding of their images begins.
        device: Device of the batches.
        workers: Number of decoding threads, :func:`count_decoders` by default; 0 decodes in the calling thread.
        ahead: Number of batches that are decoded while one is used. On CUDA it also bounds how many batches the caller
            may be ahead of the device. So the memory does not depend on the length of the stream.

    Example:
        >>> from ttvd.data.sets import ImageFolder
        >>> def read(folder: ImageFolder, batch_size: int) -> Generator[Tensor, None, None]:
        ...     batches = torch.arange(len(folder)).split(batch_size)
        ...     return prefetch(((folder, rows) for rows in batches), "cpu", workers=2)
    """
    workers = _check_workers(workers, ahead)
    place = torch.device(device)
    copier = _CudaCopier(place, ahead) if place.type == "cuda" else _Copier(place)
    return _prefetch(((images.pixels, rows.tolist()) for images, rows in requests), copier, workers, ahead)


@dataclass(frozen=True, eq=False)
class Batch:
    """Images that were loaded together.

    Attributes:
        positions: Position of each image in its source.
        images: float32 (b, c, h, w) in [0, 1]; None if no image of the batch can be used.
        unreadable: Position of each image that was left out, and the reason.
    """

    positions: list[int]
    images: Tensor | None
    unreadable: list[tuple[int, str]]

    @property
    def stop(self) -> int:
        """Position after the last image of the batch."""
        return max([*self.positions, *(position for position, _ in self.unreadable)]) + 1


def load_batches(
    read: ReadImage,
    positions: Iterable[int],
    size: int,
    *,
    shape: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    on_unreadable: OnUnreadable = "stop",
    workers: int | None = None,
    ahead: int = 4,
) -> Generator[Batch, None, None]:
    """Yield batches of images, and leave out or refuse those that cannot be used.

    An image cannot be used if it cannot be decoded, holds values that are not finite, or has another shape than the
    others. The shape is known before images are read ahead, so that one of another shape is dropped as soon as it is
    read: no more than `ahead` + 1 batches of images of that shape are kept.

    Args:
        read: Reads an image by its position, such as `ImageFolder.pixels`.
        positions: Positions in the order of the stream.
        size: Number of images in a batch, including those that turn out to be unreadable; the last may have fewer.
        shape: Shape (c, h, w) that every image must have; by default, the shape of the first image.
        names: Name of the image at each position, for messages.
        on_unreadable: "stop" raises an error, "skip" leaves the image out and records it in the batch.
        workers: Number of decoding threads, :func:`count_decoders` by default; 0 decodes in the calling thread.
        ahead: Number of batches that are decoded while one is used.

    Raises:
        ValueError: An image cannot be used and `on_unreadable` is "stop".

    Example:
        >>> from ttvd.data.sets import from_arrays
        >>> images = from_arrays(torch.zeros(5, 1, 8, 8), [0, 1, 0, 1, 0])
        >>> [len(batch.positions) for batch in load_batches(images.pixels, range(5), 2)]
        [2, 2, 1]
    """
    if size < 1:
        raise ValueError(f"a batch needs at least 1 image, got {size}")
    if on_unreadable not in get_args(OnUnreadable):
        raise ValueError(f"on_unreadable must be 'stop' or 'skip', got {on_unreadable!r}")
    workers = _check_workers(workers, ahead)
    collate = _Collate(None if shape is None else tuple(shape), names, on_unreadable)
    return _load_batches(read, iter(positions), size, collate, workers, ahead)


class _Deferred:
    """Reads an image when its result is asked for, in place of a future where no thread is wanted."""

    def __init__(self, read: ReadImage, position: int) -> None:
        self._read, self._position = read, position

    def done(self) -> bool:
        return False

    def result(self) -> Tensor:
        return self._read(self._position)


_Pending = Future[Tensor] | _Deferred


class _ReadAhead:
    """The batches that are being read.

    Attributes:
        waiting: Positions and images of each batch, in order.
    """

    def __init__(self, requests: Iterable[tuple[ReadImage, list[int]]], workers: int, ahead: int) -> None:
        self.waiting: deque[tuple[list[int], list[_Pending]]] = deque()
        self._requests = iter(requests)
        self._pool = ThreadPoolExecutor(workers, THREAD_NAME) if workers else None
        self._ahead = ahead

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def request(self, count: int) -> None:
        """Begin to read some more batches."""
        for read, positions in islice(self._requests, count):
            self.waiting.append((positions, [self._submit(read, position) for position in positions]))

    def take(self) -> list[Tensor]:
        """Wait for the images of the next batch."""
        return [image.result() for image in self.waiting.popleft()[1]]

    def is_ready(self) -> bool:
        """Whether the next batch can be taken without waiting; one with an error is left until it is due."""
        if not self.waiting:
            return False
        images = self.waiting[0][1]
        if not all(isinstance(i, Future) and i.done() and i.exception() is None for i in images):
            return False
        return len({image.result().shape for image in images}) == 1

    def _submit(self, read: ReadImage, position: int) -> _Pending:
        return _Deferred(read, position) if self._pool is None else self._pool.submit(read, position)


def _check_workers(workers: int | None, ahead: int) -> int:
    workers = count_decoders() if workers is None else workers
    if workers < 0 or ahead < 1:
        raise ValueError(f"expected workers >= 0 and ahead >= 1, got workers = {workers} and ahead = {ahead}")
    return workers


def _prefetch(
    requests: Iterable[tuple[ReadImage, list[int]]], copier: _Copier, workers: int, ahead: int
) -> Generator[Tensor, None, None]:
    copied: _Copied | None = None
    with _ReadAhead(requests, workers, ahead) as reading:
        reading.request(ahead)
        while reading.waiting or copied is not None:
            reading.request(1)
            if copied is None:
                copied = copier.send(reading.take())
            images, copied = copier.receive(copied), None
            if reading.is_ready():
                copied = copier.send(reading.take())
            yield images


def _load_batches(
    read: ReadImage, positions: Iterator[int], size: int, collate: _Collate, workers: int, ahead: int
) -> Generator[Batch, None, None]:
    positions = chain(collate.find_shape(read, positions), positions)
    requests = (
        (partial(collate.read, read), batch) for batch in iter(lambda: list(islice(positions, size)), [])
    )
    with _ReadAhead(requests, workers, ahead) as reading:
        reading.request(ahead)
        while reading.waiting:
            reading.request(1)
            yield collate(*reading.waiting.popleft())


class _Collate:
    """Makes a batch of the images that can be used."""

    def __init__(
        self, shape: tuple[int, ...] | None, names: Sequence[str] | None, on_unreadable: OnUnreadable
    ) -> None:
        self._shape, self._given = shape, shape is not None
        self._names, self._on_unreadable = names, on_unreadable

    def __call__(self, positions: list[int], pending: list[_Pending]) -> Batch:
        images: dict[int, Tensor] = {}
        unreadable: list[tuple[int, str]] = []
        for position, waiting in zip(positions, pending, strict=True):
            try:
                images[position] = waiting.result()
            except ValueError as error:
                if self._on_unreadable == "stop":
                    name = f"image {position}" if self._names is None else self._names[position]
                    raise ValueError(
                        f"{name}: {error} (on_unreadable='skip' or --unreadable skip leaves such images out)"
                    ) from error
                unreadable.append((position, str(error)))
        stacked = to_floats(stack_images(list(images.values()))) if images else None
        return Batch(list(images), stacked, unreadable)

    def find_shape(self, read: ReadImage, positions: Iterator[int]) -> list[int]:
        """Read images until one can be used, and expect its shape from now on; return the positions that were drawn."""
        drawn: list[int] = []
        for position in positions if self._shape is None else ():
            drawn.append(position)
            try:
                self._shape = tuple(self.read(read, position).shape)
            except ValueError:
                if self._on_unreadable == "skip":
                    continue
            break
        return drawn

    def read(self, read: ReadImage, position: int) -> Tensor:
        """Read an image in whatever thread this is, and check it."""
        try:
            return self._check(read(position))
        except (ValueError, OSError) as error:
            reason = str(error)
        # Outside of the handler, so that an error that waits for its turn keeps no pixels alive by its traceback.
        raise ValueError(reason)

    def _check(self, image: Tensor) -> Tensor:
        shape = tuple(image.shape)
        if len(shape) != 3 or not (image.is_floating_point() or image.dtype == torch.uint8):
            raise ValueError(
                f"it has shape {shape} and type {image.dtype}, expected bytes or floats (c, h, w)"
            )
        if self._shape is not None and shape != self._shape:
            expected = "expected" if self._given else "the images before it have"
            raise ValueError(f"it has size {shape}, {expected} {self._shape}; resize and crop the images")
        if image.is_floating_point() and not bool(image.isfinite().all()):
            raise ValueError("it holds NaN or infinite values")
        return image


class _Copied(NamedTuple):
    """Bytes of a batch on their way to the device, and the event of their arrival where there is one."""

    pixels: Tensor
    arrival: torch.cuda.Event | None = None


class _Copier:
    """Copies batches to a device in two steps: what is sent early has arrived when it is received."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, images: Sequence[Tensor]) -> _Copied:
        return _Copied(stack_images(images).to(self.device))

    def receive(self, copied: _Copied) -> Tensor:
        return to_floats(copied.pixels)


class _CudaCopier(_Copier):
    """Copies batches to a CUDA device on a stream of its own."""

    def __init__(self, device: torch.device, ahead: int) -> None:
        # The stream's device has a number: what "cuda" alone means may change between two batches.
        self._stream = torch.cuda.Stream(device)
        super().__init__(self._stream.device)
        self._ahead = ahead
        self._received: deque[torch.cuda.Event] = deque()

    def send(self, images: Sequence[Tensor]) -> _Copied:
        # Pinned memory may be dropped at once: its allocator waits for the copy before it reuses the memory.
        pinned = stack_images(images, pin_memory=True)
        with torch.cuda.stream(self._stream):
            pixels = pinned.to(self.device, non_blocking=True)
            return _Copied(pixels, self._stream.record_event())

    def receive(self, copied: _Copied) -> Tensor:
        current = torch.cuda.current_stream(self.device)
        assert copied.arrival is not None
        current.wait_event(copied.arrival)
        images = to_floats(copied.pixels)
        # The bytes belong to the other stream, which must not reuse their memory before this one is done.
        copied.pixels.record_stream(current)
        self._wait_for_device(current)
        return images

    def _wait_for_device(self, current: torch.cuda.Stream) -> None:
        """Sleep until the device is at most `ahead` batches behind; otherwise bytes pile up on both sides."""
        # A blocking event sleeps instead of spinning: the decoding threads need the core.
        event = torch.cuda.Event(blocking=True)
        event.record(current)
        self._received.append(event)
        if len(self._received) > self._ahead:
            self._received.popleft().synchronize()
