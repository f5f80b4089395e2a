"""Batches of a clean set, in memory or on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ttvd.data.sets import ImageFolder, LabelledImages, image_loader

Advance = Callable[[str, int], None]
"""Called with what is being made and the number of images that were finished just now."""

_VALUES = 1 << 23


def batches_of(source: LabelledImages, workers: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield float images and their numbers; a batch holds about 32 MB.

    Args:
        source: The clean set.
        workers: Processes that decode pictures.
    """
    size = max(1, _VALUES // source.floats([0]).numel())
    if isinstance(source, ImageFolder):
        for batch in image_loader(source, size, workers):
            yield batch.images, batch.index
        return
    for start in range(0, len(source), size):
        index = torch.arange(start, min(start + size, len(source)))
        yield source.floats(index), index
