"""Kernels of batch norms whose values follow other statistics than those of the batch."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class Known(NamedTuple):
    """What a norm knows after its pass: its affine parameters, the statistics to use, those of the batch; all (c,)."""

    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    var: Tensor
    batch_mean: Tensor
    batch_var: Tensor
    eps: float


class Scale(NamedTuple):
    """What the gradient of a norm needs of its channels: all (c,).

    Attributes:
        batch_invstd: 1 / std of the batch.
        ratio: r = std of the batch / std.
        offset: d = (mean of the batch - mean) / std.
        slope: Weight times r.
    """

    batch_invstd: Tensor
    ratio: Tensor
    offset: Tensor
    slope: Tensor


class Scales:
    """Scales of all norms of a pass, computed together when the first of them is asked for.

    A norm has a few dozen channels and a network dozens of norms: a few operations on all channels take the place of
    a few for every norm.
    """

    def __init__(self) -> None:
        self._known: list[Known] = []
        self._found: dict[int, Scale] = {}

    def add(self, known: Known) -> int:
        """Announce a norm; returns the number to ask with."""
        self._known.append(known)
        return len(self._known) - 1

    def find(self, number: int) -> Scale:
        """The scale of the norm with this number."""
        if number not in self._found:
            groups: dict[tuple[Any, ...], list[int]] = {}
            for i, known in enumerate(self._known):
                if i not in self._found:
                    kind = (known.mean.dtype, known.mean.device, known.eps, known.weight is None)
                    groups.setdefault(kind, []).append(i)
            made: dict[int, Scale] = {}
            for group in groups.values():
                made.update(zip(group, _scale([self._known[i] for i in group]), strict=True))
            self._found |= made
        return self._found[number]


@torch.no_grad()
def _scale(norms: list[Known]) -> list[Scale]:
    eps, sizes = norms[0].eps, [len(known.mean) for known in norms]
    mean, var, batch_mean, batch_var = (
        torch.cat([getattr(known, name) for known in norms])
        for name in ("mean", "var", "batch_mean", "batch_var")
    )
    invstd, batch_invstd = torch.rsqrt(var + eps), torch.rsqrt(batch_var + eps)
    ratio, offset = invstd / batch_invstd, (batch_mean - mean) * invstd
    weights = [known.weight for known in norms if known.weight is not None]
    slope = torch.cat(weights) * ratio if weights else ratio
    parts = (part.split(sizes) for part in (batch_invstd, ratio, offset, slope))
    return [Scale(*each) for each in zip(*parts, strict=True)]


class _Renorm(torch.autograd.Function):
    """Batch norm with the values of some statistics and the gradient of those of the batch (Ioffe 2017).

    out = weight * (r * y + d) + bias, where y is normalised by the batch, r = std of the batch / std and
    d = (mean of the batch - mean) / std, both constants. One pass forward, as the moments are known. It has no second
    derivative.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, known: Known, scales: Scales
    ) -> Tensor:
        # The weight is saved for the check that nobody changes it before the gradient is asked for.
        ctx.save_for_backward(x, weight)
        ctx.known, ctx.scales, ctx.number = known, scales, scales.add(known)
        return F.batch_norm(x, known.mean, known.var, weight, bias, eps=known.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), known, scale = ctx.saved_tensors, ctx.known, ctx.scales.find(ctx.number)
        biased = known.bias is not None
        wanted = [ctx.needs_input_grad[0], weight is not None, weight is not None or biased]
        by_x, by_y, by_bias = torch.ops.aten.native_batch_norm_backward(
            *(gradient, x, scale.slope, None, None),
            *(known.batch_mean, scale.batch_invstd, True, known.eps, wanted),
        )
        by_weight = None if weight is None else torch.addcmul(by_y * scale.ratio, by_bias, scale.offset)
        return by_x if wanted[0] else None, by_weight, by_bias if biased else None, None, None


def kernels_take(x: Tensor) -> bool:
    """Whether :func:`renormalise` takes a tensor: its kernels have statistics in float32 or better."""
    return not torch.compiler.is_compiling() and (
        x.is_cuda or (x.device.type == "cpu" and x.dtype.itemsize >= 4)
    )


def renormalise(x: Tensor, known: Known, scales: Scales) -> Tensor:
    """Normalise (b, c, ...) with the gradient of batch norm on the batch; what is ``known`` of it are constants.

    Args:
        x: What :func:`kernels_take`.
        known: Of the norm and the batch.
        scales: Those of the pass.
    """
    # Detached: else what the gradients need would keep the graph alive that keeps them.
    weight, bias = (None if part is None else part.detach() for part in (known.weight, known.bias))
    fixed = known._replace(weight=weight, bias=bias)
    found: Tensor = _Renorm.apply(x, known.weight, known.bias, fixed, scales)  # type: ignore[no-untyped-call]
    return found


def rescale(x: Tensor, known: Known) -> Tensor:
    """Normalise (b, c, ...): a scale and a shift bring what is normalised by the batch to the other statistics.

    In this way the passes over the input are those of one batch norm. The statistics have the gradients that they come
    with; where they have none the gradient is that of :func:`renormalise`.
    """
    invstd = torch.rsqrt(known.var + known.eps)
    scale = torch.sqrt(known.batch_var + known.eps) * invstd
    shift = (known.batch_mean - known.mean) * invstd
    if known.weight is not None:
        scale, shift = known.weight * scale, known.weight * shift
    shift = shift if known.bias is None else known.bias + shift
    return F.batch_norm(x, None, None, scale, shift, training=True, eps=known.eps)


class _Moments(torch.autograd.Function):
    """Mean and biased variance (c,) of the channels of (b, c, ...): one pass each way, where var_mean has several."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        # On a GPU sums are in float32, and so is what comes of half precision.
        wide = x.float() if x.dtype.itemsize < 4 and not x.is_cuda else x
        mean, var = torch.batch_norm_update_stats(wide, None, None, 0.0)
        ctx.save_for_backward(x, mean)
        return mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_mean: Tensor, by_var: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        values = x.numel() / x.shape[1]
        slope = by_var * (2.0 / values)
        shift = by_mean / values - slope * mean
        shape = [1, -1] + [1] * (x.ndim - 2)
        return torch.addcmul(shift.view(shape), x, slope.view(shape), out=torch.empty_like(x))


def find_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (c,) of the channels, in float32 or better."""
    if x.device.type in ("cpu", "cuda") and not torch.compiler.is_compiling():
        return _Moments.apply(x)  # type: ignore[no-untyped-call,no-any-return]
    wide = x.float() if x.dtype.itemsize < 4 else x
    var, mean = torch.var_mean(wide, [0, *range(2, x.ndim)], correction=0)
    return mean, var
