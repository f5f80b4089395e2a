"""Is one method better than another on the same stream? Paired intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ttvd.bench.run import Record


@dataclass(frozen=True)
class Interval:
    """A difference of errors (first minus second; negative: the first is better) and its interval.

    Attributes:
        difference: Of the errors, as a share.
        low: Lower end.
        high: Upper end.
    """

    difference: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """``"better"`` or ``"worse"`` where the interval leaves zero out, else ``"tie"``."""
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
        second: Records of the other on the same streams, in the same order.
        level: Coverage of the interval.
        draws: Bootstrap draws.
        seed: Seed of the draws.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"expected records of the same streams, got {len(first)} and {len(second)}")
    generator = torch.Generator().manual_seed(seed)
    totals = torch.zeros(draws, dtype=torch.float64)
    total, count = 0.0, 0.0
    for one, other in zip(first, second, strict=True):
        if not torch.equal(one.sizes(), other.sizes()):
            raise ValueError("the two methods did not see the same batches")
        gaps = one.wrong() - other.wrong()
        picks = torch.randint(len(gaps), (draws, len(gaps)), generator=generator)
        totals += gaps[picks].sum(1)
        total, count = total + float(gaps.sum()), count + float(one.sizes().sum())
    edges = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = (totals / count).quantile(edges).tolist()
    return Interval(total / count, low, high)
