"""Pictures that are decoded ahead of their use, by threads, and travel to the device while it works on others.

Threads and not processes: decoding and resizing hold no lock of the interpreter, no pixel has to cross between
processes, and the workers of a grid, which may not start processes of their own, can have threads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

THREAD_NAME = "ttvd-decode"
_MOST_DECODERS = 8


class Pictures(Protocol):
    """Pictures that are decoded one at a time, such as an `ImageFolder`; several threads ask at once."""

    def pixels(self, position: int) -> Tensor:
        """One picture as bytes (c, h, w)."""


Request = tuple[Pictures, Tensor]
"""A batch to come: where its pictures are, and their positions there."""


def count_decoders() -> int:
    """Threads that decode unless told otherwise: one for each processor that this process may use, 8 at most."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST_DECODERS, usable)


def prefetch(
    requests: Iterable[Request],
    device: torch.device | str = "cpu",
    *,
    workers: int | None = None,
    ahead: int = 4,
) -> Generator[Tensor, None, None]:
    """Yield batches of pictures as float32 (b, c, h, w) in [0, 1] on a device, in the order of the requests.

    The numbers are those of `ImageFolder.floats`, bit for bit. A picture that cannot be read raises what it raises
    there, and not before the turn of its batch. Closing the generator stops the threads.

    Pictures travel as bytes. To CUDA they go from pinned memory, on a stream of their own, while the device is busy
    with the batch before; there they become floats. Threads that decode call nothing of CUDA, so that they cannot
    disturb a graph that is being recorded.

    Args:
        requests: One for each batch; drawn as early as their pictures are decoded.
        device: Where the batches are wanted.
        workers: Threads that decode; :func:`count_decoders` unless given, and 0 decodes where the batch is asked for.
        ahead: Batches that are decoded while one is used. On CUDA, also the batches that the caller may be ahead of
            the device; together they bound the memory, whatever the length of the stream.

    Example:
        >>> from ttvd.data.sets import ImageFolder
        >>> def read(folder: ImageFolder, batch_size: int) -> Generator[Tensor, None, None]:
        ...     batches = torch.arange(len(folder)).split(batch_size)
        ...     return prefetch(((folder, rows) for rows in batches), "cpu", workers=2)
    """
    workers = count_decoders() if workers is None else workers
    if workers < 0 or ahead < 1:
        raise ValueError(
            f"prefetching needs workers >= 0 and ahead >= 1, got workers = {workers} and ahead = {ahead}"
        )
    place = torch.device(device)
    lane = _CudaLane(place, ahead) if place.type == "cuda" else _Lane(place)
    return _decode_ahead(requests, lane, workers, ahead) if workers else _decode_now(requests, lane)


def to_floats(pixels: Tensor) -> Tensor:
    """Bytes as float32 in [0, 1], with the same result on every device.

    Example:
        >>> to_floats(torch.tensor([0, 51, 255], dtype=torch.uint8)).tolist()
        [0.0, 0.20000000298023224, 1.0]
    """
    # Divided by a number, CUDA multiplies with its rounded inverse; divided by a tensor, it divides.
    return pixels.float().div_(torch.full((), 255.0, device=pixels.device))


class _Sent(NamedTuple):
    """Bytes of a batch on their way to the device; what they wait for, if they do."""

    pixels: Tensor
    arrival: torch.cuda.Event | None = None


class _Lane:
    """The way to a device, in two steps: what is sent early has arrived when it is received."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, pictures: Sequence[Tensor]) -> _Sent:
        return _Sent(torch.stack(list(pictures)).to(self.device))

    def receive(self, sent: _Sent) -> Tensor:
        return to_floats(sent.pixels)


class _CudaLane(_Lane):
    """The way to a CUDA device, on a stream of its own."""

    def __init__(self, device: torch.device, ahead: int) -> None:
        # With its number: what "cuda" means may change between two batches.
        self._stream = torch.cuda.Stream(device)
        super().__init__(self._stream.device)
        self._ahead = ahead
        self._received: deque[torch.cuda.Event] = deque()

    def send(self, pictures: Sequence[Tensor]) -> _Sent:
        shape = (len(pictures), *pictures[0].shape)
        # Pinned memory may be dropped at once: its allocator waits for the copy before it gives it out again.
        pinned = torch.stack(list(pictures), out=torch.empty(shape, dtype=torch.uint8, pin_memory=True))
        with torch.cuda.stream(self._stream):
            pixels = pinned.to(self.device, non_blocking=True)
            return _Sent(pixels, self._stream.record_event())

    def receive(self, sent: _Sent) -> Tensor:
        current = torch.cuda.current_stream(self.device)
        assert sent.arrival is not None
        current.wait_event(sent.arrival)
        images = to_floats(sent.pixels)
        # The bytes belong to the other stream, which must not use their memory again before this one is done.
        sent.pixels.record_stream(current)
        self._wait_for_device(current)
        return images

    def _wait_for_device(self, current: torch.cuda.Stream) -> None:
        """Sleep until the device is at most `ahead` batches behind: bytes pile up on both sides otherwise."""
        event = torch.cuda.Event(
            blocking=True
        )  # asleep and not spinning: the threads that decode want the core
        event.record(current)
        self._received.append(event)
        if len(self._received) > self._ahead:
            self._received.popleft().synchronize()


def _decode_now(requests: Iterable[Request], lane: _Lane) -> Generator[Tensor, None, None]:
    for source, rows in requests:
        yield lane.receive(lane.send([source.pixels(row) for row in rows.tolist()]))


def _decode_ahead(
    requests: Iterable[Request], lane: _Lane, workers: int, ahead: int
) -> Generator[Tensor, None, None]:
    upcoming = iter(requests)
    waiting: deque[list[Future[Tensor]]] = deque()
    sent: _Sent | None = None
    pool = ThreadPoolExecutor(workers, THREAD_NAME)

    def submit(count: int) -> None:
        for source, rows in islice(upcoming, count):
            waiting.append([pool.submit(source.pixels, row) for row in rows.tolist()])

    try:
        submit(ahead)
        while waiting or sent is not None:
            submit(1)
            if sent is None:
                sent = lane.send([picture.result() for picture in waiting.popleft()])
            images, sent = lane.receive(sent), None
            if waiting and _is_ready(waiting[0]):
                sent = lane.send([picture.result() for picture in waiting.popleft()])
            yield images
    finally:
        pool.shutdown(cancel_futures=True)


def _is_ready(pictures: Sequence[Future[Tensor]]) -> bool:
    """Whether a batch can be sent without waiting; one with an error is left for its turn."""
    if not all(picture.done() and picture.exception() is None for picture in pictures):
        return False
    return len({picture.result().shape for picture in pictures}) == 1
