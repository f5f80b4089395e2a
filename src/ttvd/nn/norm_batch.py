"""One forward pass of a network whose norms follow the stream: what these norms compute together."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ttvd.engine.compiling import compile_once
from ttvd.engine.flat import find_runs, join_runs, write_runs
from ttvd.engine.fused_norm import SharedFactors
from ttvd.nn.statistics import Statistics

if TYPE_CHECKING:
    from ttvd.nn.stream_norm import StreamNorm


class PendingStats(NamedTuple):
    """An update of the averages of a norm that is not written yet.

    Attributes:
        mean: The new average of the means, (c,).
        var: The new average of the variances, (c,).
        rows: Number of samples that the batch counts as.
        mixed: True for new averages as described. False for the moments of the batch itself, with ``eps`` added to the
            variance; the averages are computed from them when they are written.
    """

    mean: Tensor
    var: Tensor
    rows: Tensor | int
    mixed: bool = True


class Averages(NamedTuple):
    """The running averages of a norm.

    Attributes:
        mean: Average of the means, (c,).
        var: Average of the variances, (c,).
        rows: How many samples each channel has followed, (c,); None where that is not tracked.
    """

    mean: Tensor
    var: Tensor
    rows: Tensor | None

    def updated(self, pending: PendingStats, policy: Statistics, eps: float) -> "Averages":
        """The averages after a pending update."""
        mean, var = pending.mean, pending.var
        if not pending.mixed:
            share = share_of_batch(policy, self.rows, pending.rows, mean.dtype)
            mean, var = torch.lerp(self.mean, mean, share), torch.lerp(self.var, var - eps, share)
        return Averages(mean, var, None if self.rows is None else self.rows + pending.rows)


def share_of_batch(
    policy: Statistics, followed: Tensor | None, rows: Tensor | int, dtype: torch.dtype
) -> Tensor | float:
    """Weight of a batch in the averages; (c,) where it depends on how many samples they have ``followed``."""
    if policy.memory is None or followed is None:
        assert isinstance(rows, int)
        return 1.0 - policy.source_share(rows)
    assert policy.count is not None
    return rows / ((followed.to(dtype) + policy.count).clamp_max(policy.memory) + rows)


class NormBatch:
    """The norms of a network in one forward pass, which compute some things together to launch fewer kernels.

    Args:
        norms: The norms of the network.

    Attributes:
        factors: What their gradients need.
    """

    def __init__(self, norms: Sequence["StreamNorm"]) -> None:
        self._norms = norms
        self._shares: dict[tuple[Tensor | int, torch.dtype], dict[int, Tensor]] = {}
        self.factors = SharedFactors()

    def share(self, norm: "StreamNorm", rows: Tensor | int, dtype: torch.dtype) -> Tensor:
        """Weight (c,) of the batch in the tracked averages; valid for one use, since each use changes the averages."""
        kind = (rows, dtype)
        if kind not in self._shares:
            # A norm with a pending batch is left out: its averages are about to change.
            alike = [other for other in self._norms if not other.pending and _tracks_like(other, norm)]
            shares = _shares(alike, rows, dtype) if alike else ()
            self._shares[kind] = {id(other): share for other, share in zip(alike, shares, strict=True)}
        found = self._shares[kind].get(id(norm))
        for shares_of_norms in self._shares.values():
            shares_of_norms.pop(id(norm), None)
        return _shares([norm], rows, dtype)[0] if found is None else found

    def forget(self) -> None:
        """Drop the weights, because the averages have changed."""
        self._shares.clear()


def _tracks_like(one: "StreamNorm", other: "StreamNorm") -> bool:
    return (
        one.statistics == other.statistics
        and one.running_mean is not None
        and one.rows_followed.device == other.rows_followed.device
    )


def _shares(norms: Sequence["StreamNorm"], rows: Tensor | int, dtype: torch.dtype) -> Sequence[Tensor]:
    """Weights (c,) of a batch in the averages of norms that share a tracking policy."""
    counts = [norm.rows_followed for norm in norms]
    together = share_of_batch(norms[0].statistics, torch.cat(counts), rows, dtype)
    assert isinstance(together, Tensor)
    return torch.split(together, [len(count) for count in counts])


@torch.no_grad()
def commit(norms: Iterable["StreamNorm"]) -> None:
    """Write the pending updates of the norms to their averages, in order."""
    waiting = [(norm, norm.pending) for norm in norms if norm.pending]
    for norm, _ in waiting:
        norm.pending = ()
    while waiting:
        groups: dict[tuple[Any, ...], list[tuple[StreamNorm, PendingStats]]] = {}
        for norm, (pending, *_) in waiting:
            kind = (
                pending.mean.dtype,
                pending.mean.device,
                pending.rows,
                pending.mixed,
                norm.eps,
                norm.statistics,
            )
            groups.setdefault(kind, []).append((norm, pending))
        for group in groups.values():
            _commit_group(group)
        waiting = [(norm, rest[1:]) for norm, rest in waiting if len(rest) > 1]


def _commit_group(group: Sequence[tuple["StreamNorm", PendingStats]]) -> None:
    """Write one pending update of each of several norms with equal settings."""
    first, pending = group[0]
    dtype = pending.mean.dtype
    names = ["running_mean", "running_var"] + ["rows_followed"] * (first.statistics.memory is not None)
    buffers = [[norm.get_buffer(name) for norm, _ in group] for name in names]
    runs = [find_runs(parts) for parts in buffers]
    mean, var, *rows = map(join_runs, runs)
    joined = pending._replace(
        mean=torch.cat([part.mean for _, part in group]), var=torch.cat([part.var for _, part in group])
    )
    old = Averages(mean.to(dtype), var.to(dtype), rows[0] if rows else None)
    # Updates that are not mixed come from a compiled network.
    update = Averages.updated if pending.mixed else compile_once(Averages.updated)
    averages = update(old, joined, first.statistics, first.eps)
    for parts, places, new in zip(buffers, runs, averages, strict=False):
        if new is not None:
            write_runs(parts, places, new)
