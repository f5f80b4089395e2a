"""One pass of a batch through a network whose norms follow the stream: what they can do together."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ttvd.models.renorm import Scales

if TYPE_CHECKING:
    from ttvd.models.stream_norm import StreamNorm


class Heard(NamedTuple):
    """What the averages of a norm become when they have followed a batch.

    Attributes:
        mean: (c,).
        var: (c,).
        rows: How many the batch has.
    """

    mean: Tensor
    var: Tensor
    rows: int


class Company:
    """The norms of a network in one pass, and what they compute together: a few operations on many numbers.

    Args:
        norms: Those of the network.

    Attributes:
        scales: What their gradients need.
    """

    def __init__(self, norms: Sequence["StreamNorm"]) -> None:
        self._norms = norms
        self._shares: dict[tuple[int, torch.dtype], dict[int, Tensor]] = {}
        self.scales = Scales()

    def share(self, norm: "StreamNorm", rows: int, dtype: torch.dtype) -> Tensor:
        """Weight (c,) with which the batch enters tracked averages; good for one use, which changes the next."""
        kind = (rows, dtype)
        if kind not in self._shares:
            # Of one that has heard a batch already, the averages are about to change.
            alike = [other for other in self._norms if other.heard is None and _tracks_like(other, norm)]
            shares = share_of_batch(alike, rows, dtype) if alike else ()
            self._shares[kind] = {id(other): share for other, share in zip(alike, shares, strict=True)}
        found = self._shares[kind].get(id(norm))
        for known in self._shares.values():
            known.pop(id(norm), None)
        return share_of_batch([norm], rows, dtype)[0] if found is None else found

    def forget(self) -> None:
        """The averages have changed: weights must be computed anew."""
        self._shares.clear()


def _tracks_like(one: "StreamNorm", other: "StreamNorm") -> bool:
    return (
        one.statistics == other.statistics
        and one.running_mean is not None
        and one.rows_followed.device == other.rows_followed.device
    )


def share_of_batch(norms: Sequence["StreamNorm"], rows: int, dtype: torch.dtype) -> Sequence[Tensor]:
    """Weights (c,) with which a batch enters the averages of norms of one policy that tracks."""
    policy = norms[0].statistics
    assert policy.count is not None
    assert policy.memory is not None
    counts = [norm.rows_followed for norm in norms]
    worth = (torch.cat(counts).to(dtype) + policy.count).clamp_max(policy.memory)
    return torch.split(rows / (worth + rows), [len(count) for count in counts])


@torch.no_grad()
def take_in(norms: Iterable["StreamNorm"]) -> None:
    """Let averages become what the norms have heard; what is not finite does not enter."""
    groups: dict[tuple[Any, ...], list[tuple[StreamNorm, Heard]]] = {}
    for norm in norms:
        if (heard := norm.heard) is not None:
            kind = (heard.mean.dtype, heard.mean.device, heard.rows, norm.statistics.memory is None)
            groups.setdefault(kind, []).append((norm, heard))
            norm.heard = None
    for (_, _, rows, untracked), group in groups.items():
        sizes = [len(heard.mean) for _, heard in group]
        means = torch.cat([heard.mean for _, heard in group])
        variances = torch.cat([heard.var for _, heard in group])
        fine = means.isfinite() & variances.isfinite()
        for name, new in (("running_mean", means), ("running_var", variances)):
            averages = [norm.get_buffer(name) for norm, _ in group]
            merged = torch.where(fine, new, torch.cat(averages).to(new.dtype))
            torch._foreach_copy_(averages, list(merged.split(sizes)))
        if not untracked:
            counts = [norm.rows_followed for norm, _ in group]
            torch._foreach_add_(counts, list((fine * rows).split(sizes)))
