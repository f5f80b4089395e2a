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


class _Fused(torch.autograd.Function):
    """The same, in operations that compilers fuse; ``kept`` is (4, c): mean and 1 / std of the batch, and used ones."""

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
    """As ``x.to``, which the compiler of torch 2.11 loses gradients at where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def _spread(channels: Tensor, x: Tensor) -> Tensor:
    """Numbers (c,) in a shape that goes with (b, c, ...)."""
    return channels.view(1, -1, *[1] * (x.ndim - 2))


def kernels_take(x: Tensor) -> bool:
    """Whether :func:`renormalise` takes a tensor: kernels have statistics in float32 or better, compilers make any."""
    return torch.compiler.is_compiling() or x.is_cuda or (x.device.type == "cpu" and x.dtype.itemsize >= 4)


def renormalise(x: Tensor, known: Known, scales: Scales) -> Tensor:
    """Normalise (b, c, ...) with the gradient of batch norm on the batch; what is ``known`` of it are constants.

    Args:
        x: What :func:`kernels_take`.
        known: Of the norm and the batch.
        scales: Those of the pass.
    """
    if torch.compiler.is_compiling():
        return _fuse(x, known)
    # Detached: else what the gradients need would keep the graph alive that keeps them.
    weight, bias = (None if part is None else part.detach() for part in (known.weight, known.bias))
    fixed = known._replace(weight=weight, bias=bias)
    found: Tensor = _Renorm.apply(x, known.weight, known.bias, fixed, scales)  # type: ignore[no-untyped-call]
    return found


def _fuse(x: Tensor, known: Known) -> Tensor:
    weight = torch.ones_like(known.mean) if known.weight is None else known.weight
    bias = torch.zeros_like(known.mean) if known.bias is None else known.bias
    invstds = [torch.rsqrt(var + known.eps) for var in (known.batch_var, known.var)]
    # Put together, for that is what a compiler saves for gradients. Single numbers it would rather compute once more,
    # for every element, and of averages that have changed by then.
    kept = torch.stack([known.batch_mean, invstds[0], known.mean, invstds[1]])
    found: Tensor = _Fused.apply(x, weight, bias, kept)  # type: ignore[no-untyped-call]
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


def find_moments(x: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (c,) of the channels, in float32 or better.

    Args:
        x: (b, c, ...).
        near: Means (c,) that are not many deviations away, as those of earlier batches: of squares about them, sums
            are enough. What is exact about any number, and what compilers take for a variance, has a division for every
            element, which takes a GPU longer than to read it.
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
