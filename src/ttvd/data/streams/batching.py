"""From an order, or from an endless source of samples, to batches."""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

import numpy as np

from ttvd.data.streams.orders import Order

Sample = TypeVar("Sample")


def batches(order: Order, size: int, *, drop_last: bool = False) -> list[Order]:
    """Cut an order into consecutive batches of indices (or of rows (domain, sample)).

    Args:
        order: Sample indices (n,), or rows (n, 2) of several domains.
        size: Samples in a batch; the last batch may have fewer.
        drop_last: Leave a shorter last batch out.

    Example:
        >>> batches(np.array([3, 1, 0, 2, 4]), 2)
        [array([3, 1]), array([0, 2]), array([4])]
    """
    _check_size(size)
    stop = len(order) // size * size if drop_last else len(order)
    if stop == 0:
        raise ValueError(
            f"{len(order)} samples give no batch of {size}" + (": set drop_last=False" if len(order) else "")
        )
    return [order[start : start + size] for start in range(0, stop, size)]


def batch_iterable(
    samples: Iterable[Sample], size: int, *, drop_last: bool = False
) -> Iterator[list[Sample]]:
    """Group samples into lists as they arrive; the source may be endless and is never read ahead of a batch.

    Args:
        samples: Any iterable, for example of images from a camera; `torch.stack` makes a batch of each list.
        size: Samples in a batch; when the source ends, the last batch may have fewer.
        drop_last: Leave a shorter last batch out.

    Example:
        >>> from itertools import count
        >>> stream = batch_iterable(count(), 3)
        >>> next(stream), next(stream)
        ([0, 1, 2], [3, 4, 5])
    """
    _check_size(size)  # here and not in the generator below, so that a mistake shows at the call
    return _group_samples(iter(samples), size, size if drop_last else 1)


def order_hash(order: Order) -> str:
    """Return a short digest of an order, the same on every machine: equal digests, equal streams.

    >>> order_hash(np.array([2, 0, 1]))
    '167ee420f2576b2c'
    """
    content = np.ascontiguousarray(order, dtype="<i8")
    return hashlib.sha256(f"{content.shape}".encode() + content.tobytes()).hexdigest()[:16]


def _group_samples(samples: Iterator[Sample], size: int, fewest: int) -> Iterator[list[Sample]]:
    while len(batch := list(islice(samples, size))) >= fewest:
        yield batch


def _check_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"a batch needs at least one sample, got size={size}")
