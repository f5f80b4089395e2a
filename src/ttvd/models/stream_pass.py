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
        mixed: Whether it is that; else it is the mean of the batch, and its variance with ``eps`` on top.
    """

    mean: Tensor
    var: Tensor
    rows: int
    mixed: bool = True


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
    return torch.split(_weigh(norms, rows, dtype), [len(norm.rows_followed) for norm in norms])


def _weigh(norms: Sequence["StreamNorm"], rows: int, dtype: torch.dtype) -> Tensor:
    policy = norms[0].statistics
    assert policy.count is not None
    assert policy.memory is not None
    worth = torch.cat([norm.rows_followed for norm in norms]).to(dtype) + policy.count
    return rows / (worth.clamp_max(policy.memory) + rows)


@torch.no_grad()
def take_in(norms: Iterable["StreamNorm"]) -> None:
    """Let averages become what the norms have heard; what is not finite does not enter."""
    groups: dict[tuple[Any, ...], list[tuple[StreamNorm, Heard]]] = {}
    for norm in norms:
        if (heard := norm.heard) is not None:
            kind = (heard.mean.dtype, heard.mean.device, heard.rows, heard.mixed, norm.eps, norm.statistics)
            groups.setdefault(kind, []).append((norm, heard))
            norm.heard = None
    for (dtype, _, rows, mixed, eps, policy), group in groups.items():
        members, sizes = [norm for norm, _ in group], [len(heard.mean) for _, heard in group]
        found = [torch.cat([heard.mean for _, heard in group]), torch.cat([heard.var for _, heard in group])]
        buffers = [[norm.get_buffer(name) for norm in members] for name in ("running_mean", "running_var")]
        old = [torch.cat(averages).to(dtype) for averages in buffers]
        if not mixed:
            found[1] = found[1] - eps
            share = 1.0 - policy.source_share(rows) if policy.memory is None else _weigh(members, rows, dtype)
            found = [torch.lerp(before, batch, share) for before, batch in zip(old, found, strict=True)]
        fine = found[0].isfinite() & found[1].isfinite()
        for averages, before, new in zip(buffers, old, found, strict=True):
            torch._foreach_copy_(averages, list(torch.where(fine, new, before).split(sizes)))
        if policy.memory is not None:
            torch._foreach_add_([norm.rows_followed for norm in members], list((fine * rows).split(sizes)))
