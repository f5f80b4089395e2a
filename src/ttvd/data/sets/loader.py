"""Batches from a data set, decoded in worker processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


@dataclass(frozen=True, eq=False)
class Batch:
    """What `image_loader` yields.

    Attributes:
        images: float32 (b, c, h, w) in [0, 1].
        labels: int64 (b,).
        index: Place of each image in the data set, int64 (b,).
        unreadable: One message for each image of the batch that was left out.
    """

    images: Tensor
    labels: Tensor
    index: Tensor
    unreadable: tuple[str, ...]


class _Guarded(Dataset[tuple[int, Any, int]]):
    """Returns errors instead of raising them, so that they cross to the main process without a worker's traceback."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, position: int) -> tuple[int, Any, int]:
        try:
            image, label = self._dataset[position]
        except (OSError, ValueError) as error:
            return position, f"{error}", -1
        return position, image, int(label)

    def __len__(self) -> int:
        return len(self._dataset)


def image_loader(
    dataset: Any,
    batch_size: int = 64,
    workers: int = 2,
    *,
    order: Iterable[int] | None = None,
    skip_unreadable: bool = False,
) -> Iterator[Batch]:
    """Yield batches of a map-style data set whose items are (float image in [0, 1], label).

    Each worker prepares at most two batches ahead, and nothing is kept: memory does not depend on the length.

    Args:
        dataset: An `ImageFolder`, an `ImageSet` or any torch data set of that form, with images of one size.
        batch_size: The last batch may be shorter.
        workers: Processes that decode; 0 decodes in this one.
        order: Places in the data set, in the order of a stream; all from first to last unless given.
        skip_unreadable: Leave unreadable images out and name them in the batch; raise at the first one otherwise.

    Raises:
        ValueError: An image cannot be read, or lies outside [0, 1].

    Example:
        >>> from ttvd.data.sets import from_arrays
        >>> images = from_arrays(torch.zeros(5, 1, 8, 8), [0, 1, 0, 1, 0])
        >>> [len(batch.labels) for batch in image_loader(images, batch_size=2, workers=0)]
        [2, 2, 1]
    """
    loader: DataLoader[Any] = DataLoader(
        _Guarded(dataset),
        batch_size=batch_size,
        sampler=range(len(dataset)) if order is None else [int(place) for place in order],
        num_workers=workers,
        collate_fn=_collate,
    )
    for batch in loader:
        if batch.unreadable and not skip_unreadable:
            raise ValueError(batch.unreadable[0])
        if len(batch.labels):
            _check_values(batch)
        yield batch


def _collate(items: list[tuple[int, Any, int]]) -> Batch:
    whole = [item for item in items if not isinstance(item[1], str)]
    images = torch.stack([image for _, image, _ in whole]) if whole else torch.empty(0)
    return Batch(
        images,
        torch.tensor([label for _, _, label in whole], dtype=torch.int64),
        torch.tensor([position for position, _, _ in whole], dtype=torch.int64),
        tuple(image for _, image, _ in items if isinstance(image, str)),
    )


def _check_values(batch: Batch) -> None:
    if not batch.images.is_floating_point():
        raise ValueError(
            f"items must hold float images in [0, 1], got {batch.images.dtype}; divide bytes by 255"
        )
    low, high = (float(bound) for bound in torch.aminmax(batch.images))
    if not (low >= 0 and high <= 1):
        first = int(batch.index[0])
        raise ValueError(f"images from number {first} on lie outside [0, 1]: values from {low:g} to {high:g}")
