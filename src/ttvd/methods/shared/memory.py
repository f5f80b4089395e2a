"""Memories of images, for methods that learn from a selection of the past."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from ttvd.methods.gradient import GradientAdapter

_BLANK = (1, 1, 1)


class Clock(nn.Module):
    """Counts samples and cuts batches where an update is due.

    The count stays on the CPU wherever the adapter is, so that reading it does not wait for the device.

    Args:
        period: Samples between two updates.

    Example:
        >>> clock = Clock(4)
        >>> list(clock.pieces(6))
        [(slice(0, 4, None), True), (slice(4, 6, None), False)]
        >>> list(clock.pieces(3))
        [(slice(0, 2, None), True), (slice(2, 3, None), False)]
    """

    on_host = True
    count: Tensor

    def __init__(self, period: int) -> None:
        super().__init__()
        if period < 1:
            raise ValueError(f"an update every {period} samples is not possible; give 1 or more")
        self.period = period
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def pieces(self, size: int) -> Iterator[tuple[slice, bool]]:
        """Parts of a batch, each with whether an update is due after it."""
        start = 0
        while start < size:
            ahead = self.period - int(self.count) % self.period
            stop = min(size, start + ahead)
            self.count += stop - start
            yield slice(start, stop), stop - start == ahead
            start = stop

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return self


class Memory(nn.Module):
    """A fixed number of images with the labels that they were given; a method writes :meth:`place`.

    The size of the images is that of the first batch. Until then a single pixel of zero stands for each, which spreads
    over images of any size when a state from before the first batch is restored.

    Args:
        capacity: Number of images that the memory holds.
        like: A tensor on the device and of the type of the images.

    Attributes:
        images: (capacity, c, h, w).
        labels: (capacity,), -1 where there is no image.
    """

    images: Tensor
    labels: Tensor

    def __init__(self, capacity: int, like: Tensor) -> None:
        super().__init__()
        if capacity < 1:
            raise ValueError(f"a memory must hold at least 1 image, got capacity={capacity}")
        self.capacity = capacity
        like = like.detach()
        self.register_buffer("images", like.new_zeros(capacity, *_BLANK))
        self.register_buffer("labels", torch.full((capacity,), -1, device=like.device))

    def place(self, label: Tensor, *facts: Tensor) -> Tensor:
        """Where the next image goes: a mask (capacity,) with one true entry, or none to leave it out."""
        raise NotImplementedError

    def make_room(self, shape: tuple[int, ...]) -> None:
        """Set the shape (c, h, w) of the images."""
        known = tuple(self.images.shape[1:])
        if known == shape:
            return
        if known != _BLANK or len(shape) != 3:
            expected = "(c, h, w)" if known == _BLANK else str(known)
            raise ValueError(
                f"the memory holds images of shape {expected}, got {shape}; build a new adapter for another size"
            )
        self.images = self.images.new_zeros(self.capacity, *shape)

    @torch.no_grad()
    def offer(self, images: Tensor, labels: Tensor, *facts: Tensor) -> Tensor:
        """Show images to the memory, one after the other.

        Args:
            images: (n, c, h, w).
            labels: (n,).
            *facts: Further arguments of :meth:`place` for each image, (n, ...).

        Returns:
            Share of the images that are in the memory afterwards, a scalar.
        """
        self.make_room(tuple(images.shape[1:]))
        origin = torch.full_like(self.labels, -1)
        for i, label in enumerate(labels):
            mask = self.place(label, *(fact[i] for fact in facts))
            self.labels.copy_(torch.where(mask, label, self.labels))
            origin = torch.where(mask, i, origin)
        new = origin >= 0
        fresh = images[origin.clamp_min(0)].to(self.images.dtype)
        self.images.copy_(torch.where(new.view(-1, 1, 1, 1), fresh, self.images))
        return new.sum() / len(images)

    def class_sizes(self) -> Tensor:
        """How many images have the label of each image, (capacity,); 0 where there is no image."""
        same = self.labels[:, None] == self.labels
        return same.sum(1) * (self.labels >= 0)

    def first_free(self) -> Tensor:
        """A mask of the first place without an image; without any true entry if there is none."""
        free = self.labels < 0
        return free & (free.cumsum(0) == 1)


class MemoryAdapter(GradientAdapter):
    """Base of the methods that learn from a memory every few samples instead of from the batch at hand."""

    memory: Memory
    clock: Clock

    def fit_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The images of a state decide the size of the memory."""
        images = state.get("memory.images")
        if not isinstance(images, Tensor) or images.ndim != 4:
            return state
        if tuple(images.shape[1:]) == _BLANK and len(images) == self.memory.capacity:
            return {**state, "memory.images": images.expand_as(self.memory.images)}
        self.memory.make_room(tuple(images.shape[1:]))
        return state
