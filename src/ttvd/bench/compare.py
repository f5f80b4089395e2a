"""Is one method better than another on the same stream? Paired bootstrap intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ttvd.bench.run import Record

Pair = tuple[Sequence[Record], Sequence[Record]]


@dataclass(frozen=True)
class Interval:
    """A difference of errors (first minus second; negative: the first is better) and its interval.

    Attributes:
        difference: Difference of the errors, as a share.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    difference: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """``"better"`` or ``"worse"`` if the interval does not contain zero, else ``"tie"``."""
        return "better" if self.high < 0 else "worse" if self.low > 0 else "tie"


def paired_difference(
    first: Sequence[Record],
    second: Sequence[Record],
    *,
    level: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Difference in error of two methods on the same batches, with a bootstrap interval.

    Batches are drawn with replacement, as pairs and within each run: samples of a batch share its statistics and its
    adapted weights and are not independent of each other. Successive batches of an adapting model are not quite
    independent either, so the interval speaks of these streams, not of new source models.

    Args:
        first: Records of one method, one for each stream.
        second: Records of the other method on the same streams, in the same order.
        level: Coverage of the interval.
        draws: Number of bootstrap draws.
        seed: Seed of the draws.
    """
    return paired_differences([(first, second)], level=level, draws=draws, seed=seed)[0]


def paired_differences(
    pairs: Sequence[Pair], *, level: float = 0.95, draws: int = 10_000, seed: int = 0
) -> list[Interval]:
    """Return :func:`paired_difference` of each pair; pairs with equal numbers of batches share their draws.

    The draws depend on the numbers of batches and the seed only. With many pairs, sharing them saves most of the work.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, (first, second) in enumerate(pairs):
        if len(first) != len(second) or not first:
            raise ValueError(f"expected records of the same streams, got {len(first)} and {len(second)}")
        if any(not torch.equal(a.sizes(), b.sizes()) for a, b in zip(first, second, strict=True)):
            raise ValueError("the two methods did not see the same batches")
        groups.setdefault(tuple(len(record.sizes()) for record in first), []).append(number)
    found: dict[int, Interval] = {}
    for batches, members in groups.items():
        intervals = _bootstrap([pairs[number] for number in members], batches, level, draws, seed)
        found |= dict(zip(members, intervals, strict=True))
    return [found[number] for number in range(len(pairs))]


def _bootstrap(
    pairs: Sequence[Pair], batches: Sequence[int], level: float, draws: int, seed: int
) -> list[Interval]:
    """Intervals of pairs whose streams have the same numbers of batches."""
    generator = torch.Generator().manual_seed(seed)
    sums = torch.zeros(draws, len(pairs), dtype=torch.float64)
    total, count = torch.zeros(2, len(pairs), dtype=torch.float64)
    for place, number in enumerate(batches):
        picks = torch.randint(number, (draws, number), generator=generator)
        times = torch.zeros(draws, number, dtype=torch.float64)
        times.scatter_add_(1, picks, torch.ones((), dtype=torch.float64).expand_as(picks))
        gaps = torch.stack([one[place].wrong() - other[place].wrong() for one, other in pairs], dim=1)
        sums += times @ gaps  # whole numbers: the sum is the same in any order
        total += gaps.sum(0)
        count += torch.stack([one[place].sizes().sum() for one, _ in pairs])
    edges = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    ends = [(sums[:, k] / count[k]).quantile(edges).tolist() for k in range(len(pairs))]
    return [Interval(middle, *end) for middle, end in zip((total / count).tolist(), ends, strict=True)]
