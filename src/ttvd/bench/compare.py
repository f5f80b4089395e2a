"""Paired bootstrap intervals: is one method better than another on the same stream?"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ttvd.bench.run import Record

RecordPair = tuple[Sequence[Record], Sequence[Record]]
"""Records of two methods on the same streams, in the same order."""


@dataclass(frozen=True)
class Interval:
    """A difference of two errors and its confidence interval.

    Attributes:
        difference: Error of the first method minus error of the second, as a fraction. Negative: the first is better.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    difference: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """``"better"`` or ``"worse"`` where the interval excludes zero, else ``"tie"``."""
        return "better" if self.high < 0 else "worse" if self.low > 0 else "tie"


def paired_difference(
    first: Sequence[Record],
    second: Sequence[Record],
    *,
    level: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Compute the difference in error of two methods on the same batches, with a bootstrap interval.

    Batches are drawn with replacement, as pairs and within each run: samples of a batch share its statistics and its
    adapted weights and are not independent of each other. Successive batches of an adapting model are not quite
    independent either, so the interval speaks of these streams, not of new source models.

    Args:
        first: Records of one method, one for each stream.
        second: Records of the other method on the same streams, in the same order.
        level: Coverage of the interval.
        draws: Number of bootstrap draws.
        seed: Seed of the draws.

    Raises:
        ValueError: The records are not of the same batches, or there are none.
    """
    (interval,) = paired_differences([(first, second)], level=level, draws=draws, seed=seed)
    if interval is None:
        raise ValueError(f"expected records of the same streams, got {len(first)} and {len(second)}")
    return interval


def paired_differences(
    pairs: Sequence[RecordPair], *, level: float = 0.95, draws: int = 10_000, seed: int = 0
) -> list[Interval | None]:
    """Compute :func:`paired_difference` for each pair; None for a pair without records.

    The draws depend on the numbers of batches alone, so pairs with the same numbers share them. With many pairs this
    saves nearly all of the work.

    Args:
        pairs: Records of two methods each.
        level: Coverage of the intervals.
        draws: Number of bootstrap draws.
        seed: Seed of the draws.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, (first, second) in enumerate(pairs):
        if len(first) != len(second):
            raise ValueError(f"expected records of the same streams, got {len(first)} and {len(second)}")
        groups.setdefault(tuple(len(record.sizes()) for record in first), []).append(place)
    found: list[Interval | None] = [None] * len(pairs)
    for batches, places in groups.items():
        if batches:
            intervals = _bootstrap([pairs[place] for place in places], batches, level, draws, seed)
            for place, interval in zip(places, intervals, strict=True):
                found[place] = interval
    return found


def _bootstrap(
    pairs: Sequence[RecordPair], batches: Sequence[int], level: float, draws: int, seed: int
) -> list[Interval]:
    """Intervals of pairs whose streams have the same numbers of batches."""
    generator = torch.Generator().manual_seed(seed)
    sums = torch.zeros(draws, len(pairs), dtype=torch.float64)
    total, count = torch.zeros(2, len(pairs), dtype=torch.float64)
    for stream, number in enumerate(batches):
        picks = torch.randint(number, (draws, number), generator=generator)
        times = torch.zeros(draws, number, dtype=torch.float64)
        times.scatter_add_(1, picks, torch.ones((), dtype=torch.float64).expand_as(picks))
        gaps = []
        for first, second in pairs:
            if not torch.equal(first[stream].sizes(), second[stream].sizes()):
                raise ValueError("the two methods did not see the same batches")
            gaps.append(first[stream].wrong() - second[stream].wrong())
        stacked = torch.stack(gaps, dim=1)
        sums += times @ stacked  # whole numbers: the sum is the same in any order
        total += stacked.sum(0)
        count += torch.stack([first[stream].sizes().sum() for first, _ in pairs])
    edges = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    ends = [(sums[:, k] / count[k]).quantile(edges).tolist() for k in range(len(pairs))]
    return [Interval(middle, *end) for middle, end in zip((total / count).tolist(), ends, strict=True)]
