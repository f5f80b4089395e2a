"""Kernels of batch norms that normalise by other statistics than those of the batch."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class NormStats(NamedTuple):
    """The affine parameters of a norm, the statistics that it uses, and those of the batch; all (c,)."""

    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    var: Tensor
    batch_mean: Tensor
    batch_var: Tensor
    eps: float


class RenormFactors(NamedTuple):
    """Factors that the gradient of a norm needs for each channel; all (c,).

    Attributes:
        batch_invstd: 1 / std of the batch.
        ratio: r = std of the batch / std.
        offset: d = (mean of the batch - mean) / std.
        slope: The weight of the norm times r.
    """

    batch_invstd: Tensor
    ratio: Tensor
    offset: Tensor
    slope: Tensor


class SharedFactors:
    """The factors of all norms of a forward pass, computed together when the first of them is needed.

    A norm has a few dozen channels and a network dozens of norms. A few operations on all channels replace a few for
    every norm.
    """

    def __init__(self) -> None:
        self._stats: list[NormStats] = []
        self._found: dict[int, RenormFactors] = {}

    def add(self, stats: NormStats) -> int:
        """Add a norm; returns its number."""
        self._stats.append(stats)
        return len(self._stats) - 1

    def find(self, number: int) -> RenormFactors:
        """The factors of the norm with this number."""
        if number not in self._found:
            groups: dict[tuple[Any, ...], list[int]] = {}
            for i, stats in enumerate(self._stats):
                if i not in self._found:
                    kind = (stats.mean.dtype, stats.mean.device, stats.eps, stats.weight is None)
                    groups.setdefault(kind, []).append(i)
            made: dict[int, RenormFactors] = {}
            for group in groups.values():
                made.update(zip(group, _compute_factors([self._stats[i] for i in group]), strict=True))
            self._found |= made
        return self._found[number]


@torch.no_grad()
def _compute_factors(norms: list[NormStats]) -> list[RenormFactors]:
    eps, sizes = norms[0].eps, [len(stats.mean) for stats in norms]
    mean, var, batch_mean, batch_var = (
        torch.cat([getattr(stats, name) for stats in norms])
        for name in ("mean", "var", "batch_mean", "batch_var")
    )
    invstd, batch_invstd = torch.rsqrt(var + eps), torch.rsqrt(batch_var + eps)
    ratio, offset = invstd / batch_invstd, (batch_mean - mean) * invstd
    weights = [stats.weight for stats in norms if stats.weight is not None]
    slope = torch.cat(weights) * ratio if weights else ratio
    parts = (part.split(sizes) for part in (batch_invstd, ratio, offset, slope))
    return [RenormFactors(*each) for each in zip(*parts, strict=True)]


class _Renorm(torch.autograd.Function):
    """Batch norm with the values of some statistics and the gradient of those of the batch (Ioffe 2017).

    out = weight * (r * y + d) + bias, where y is normalised by the batch, r = std of the batch / std and
    d = (mean of the batch - mean) / std, both constants. The moments are given, so the forward pass reads its input
    once. There is no second derivative.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        stats: NormStats,
        factors: SharedFactors,
    ) -> Tensor:
        # The weight is saved so that autograd notices a change before the backward pass.
        ctx.save_for_backward(x, weight)
        ctx.stats, ctx.factors, ctx.number = stats, factors, factors.add(stats)
        return F.batch_norm(x, stats.mean, stats.var, weight, bias, eps=stats.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), stats, factors = ctx.saved_tensors, ctx.stats, ctx.factors.find(ctx.number)
        biased = stats.bias is not None
        wanted = [ctx.needs_input_grad[0], weight is not None, weight is not None or biased]
        by_x, by_y, by_bias = torch.ops.aten.native_batch_norm_backward(
            *(gradient, x, factors.slope, None, None),
            *(stats.batch_mean, factors.batch_invstd, True, stats.eps, wanted),
        )
        by_weight = None if weight is None else torch.addcmul(by_y * factors.ratio, by_bias, factors.offset)
        return by_x if wanted[0] else None, by_weight, by_bias if biased else None, None, None


class _Fused(torch.autograd.Function):
    """The same in operations that compilers fuse. ``kept`` (4, c): mean and 1 / std of the batch, and those in use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, kept)
        _, _, mean, invstd = kept
        out = (_cast(x, kept.dtype) - _spread(mean, x)) * _spread(weight * invstd, x) + _spread(bias, x)
        return _cast(out, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, kept = ctx.saved_tensors
        batch_mean, batch_invstd, mean, invstd = kept
        over, values = [0, *range(2, x.ndim)], x.numel() // x.shape[1]
        wide, centred = _cast(gradient, kept.dtype), _cast(x, kept.dtype) - _spread(batch_mean, x)
        by_bias, by_scale = wide.sum(over), (wide * centred).sum(over)
        pulled = _spread(by_bias / values, x) + centred * _spread(
            by_scale * batch_invstd.square() / values, x
        )
        by_x = _cast((wide - pulled) * _spread(weight * invstd, x), x.dtype)
        return by_x, invstd * (by_scale + (batch_mean - mean) * by_bias), by_bias, None


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Like ``x.to``; the compiler of torch 2.11 loses the gradients of one that does nothing."""
    return x if x.dtype == dtype else x.to(dtype)


def _spread(channels: Tensor, x: Tensor) -> Tensor:
    """Numbers (c,) in a shape that broadcasts to (b, c, ...)."""
    return channels.view(1, -1, *[1] * (x.ndim - 2))


def has_kernels(x: Tensor) -> bool:
    """Whether :func:`renormalise` supports a tensor: kernels need float32 on a CPU, compiled code needs nothing."""
    return torch.compiler.is_compiling() or x.is_cuda or (x.device.type == "cpu" and x.dtype.itemsize >= 4)


def renormalise(x: Tensor, stats: NormStats, factors: SharedFactors) -> Tensor:
    """Normalise (b, c, ...) with the gradient of batch norm on the batch; the statistics are constants.

    Args:
        x: A tensor for which :func:`has_kernels`.
        stats: The statistics of the norm and of the batch.
        factors: The factors of the norms in this forward pass.
    """
    if torch.compiler.is_compiling():
        return _fuse(x, stats)
    # Detached: otherwise the saved tensors would keep the graph alive that keeps them.
    weight, bias = (None if part is None else part.detach() for part in (stats.weight, stats.bias))
    fixed = stats._replace(weight=weight, bias=bias)
    found: Tensor = _Renorm.apply(x, stats.weight, stats.bias, fixed, factors)  # type: ignore[no-untyped-call]
    return found


def _fuse(x: Tensor, stats: NormStats) -> Tensor:
    weight = torch.ones_like(stats.mean) if stats.weight is None else stats.weight
    bias = torch.zeros_like(stats.mean) if stats.bias is None else stats.bias
    invstds = [torch.rsqrt(var + stats.eps) for var in (stats.batch_var, stats.var)]
    # Stacked, so that the compiler saves them for the backward pass. It would compute single tensors again for every
    # element, from averages that have changed by then.
    kept = torch.stack([stats.batch_mean, invstds[0], stats.mean, invstds[1]])
    found: Tensor = _Fused.apply(x, weight, bias, kept)  # type: ignore[no-untyped-call]
    return found


def rescale(x: Tensor, stats: NormStats) -> Tensor:
    """Normalise (b, c, ...) by the batch, then scale and shift the result to the other statistics.

    The input is read as often as by one batch norm. Gradients flow through statistics that require them; otherwise the
    gradient is that of :func:`renormalise`.
    """
    invstd = torch.rsqrt(stats.var + stats.eps)
    scale = torch.sqrt(stats.batch_var + stats.eps) * invstd
    shift = (stats.batch_mean - stats.mean) * invstd
    if stats.weight is not None:
        scale, shift = stats.weight * scale, stats.weight * shift
    shift = shift if stats.bias is None else stats.bias + shift
    return F.batch_norm(x, None, None, scale, shift, training=True, eps=stats.eps)


class _Moments(torch.autograd.Function):
    """Mean and biased variance (c,) of the channels of (b, c, ...), in one pass each way; var_mean needs several."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        # GPU kernels sum half precision in float32 and return float32.
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


def find_moments(x: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (c,) of the channels, in float32 or better.

    Args:
        x: (b, c, ...).
        near: Means (c,) that are not many deviations away, such as those of earlier batches. Sums of squares about
            them are accurate enough. Algorithms that are accurate about any number, like the compiler's variance,
            divide for every element, which takes a GPU longer than reading it.
    """
    over = [0, *range(2, x.ndim)]
    if not torch.compiler.is_compiling():
        if x.device.type in ("cpu", "cuda"):
            return _Moments.apply(x)  # type: ignore[no-untyped-call,no-any-return]
        var, mean = torch.var_mean(x.to(near.dtype), over, correction=0)
        return mean, var
    apart = x.to(near.dtype) - _spread(near, x)
    mean, square = apart.mean(over), apart.square().mean(over)
    return near + mean, (square - mean.square()).clamp_min(0.0)
