"""Batch norm at test time, by statistics that follow a policy."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from ttvd.models.statistics import Statistics


class Follower(nn.Module):
    """What may have averages that follow the stream.

    Attributes:
        following: Whether they learn from what comes; set by ``following_stream``, at whose end they have learnt.
        settled: Whether they have learnt from it already: it must not count twice.
    """

    following: bool
    settled: bool

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.following = self.settled = False

    @property
    def follows(self) -> bool:
        """Whether there are such averages."""
        return True


class StreamNorm(Follower, _BatchNorm):
    """Batch norm in evaluation mode whose statistics follow a :class:`Statistics` policy.

    A channel of which the batch shows a single value has no variance: such an input is normalised with the source
    statistics, or what they have become along the stream. Statistics that are not finite never enter the running
    average.
    """

    rows_followed: Tensor
    heard: "Heard | None" = None

    def __init__(self, layer: _BatchNorm, statistics: Statistics) -> None:
        Follower.__init__(self)
        self.num_features, self.eps, self.momentum = layer.num_features, layer.eps, layer.momentum
        self.affine, self.track_running_stats = layer.affine, layer.track_running_stats
        self.weight, self.bias = layer.weight, layer.bias
        self.statistics = statistics
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(layer, name))
        if statistics.memory is not None and layer.running_mean is not None:
            # Whole numbers, which no change of precision rounds; for each channel, as one may be skipped.
            self.register_buffer("rows_followed", torch.zeros_like(layer.running_mean, dtype=torch.int64))
        self.training = False

    @property
    def follows(self) -> bool:
        """Whether the statistics are averages that follow the stream."""
        return self.statistics.follows

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"batch norm expects (b, c, ...), got a tensor of shape {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; the running average learns inside :func:`following_stream`, once from a batch.

        Inside :func:`settled_stream` it is used as it is, for it has the batch already.
        """
        self._check_input_dim(input)
        if self.running_mean is None or self.running_var is None:
            return _normalise_by_batch(input, self.weight, self.bias, self.eps)
        share = self.statistics.source_share(len(input))
        source_alone = share == 1.0 and not self.statistics.renorm
        if source_alone or input.numel() == input.shape[1]:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        if share == 0.0 and not self.statistics.follows:
            return _normalise_by_batch(input, self.weight, self.bias, self.eps)
        return self._normalise_mixed(input, self.running_mean, self.running_var)

    def _normalise_mixed(self, x: Tensor, running_mean: Tensor, running_var: Tensor) -> Tensor:
        take_in([self])  # where a layer is used twice, the second time knows of the first
        batch_mean, batch_var = _find_moments(x.detach() if self.statistics.renorm else x)
        dtype = batch_mean.dtype
        share = self._share_of_batch(len(x), dtype)
        mean = torch.lerp(running_mean.to(dtype), batch_mean, share)
        var = torch.lerp(running_var.to(dtype), batch_var, share)
        if self.following and self.statistics.follows and not self.settled:
            self._hear(Heard(mean.detach(), var.detach(), len(x)))
        weight, bias = (None if part is None else part.to(dtype) for part in (self.weight, self.bias))
        if not torch.is_grad_enabled():
            return F.batch_norm(x, mean, var, weight, bias, eps=self.eps)
        if self.statistics.renorm and _is_plain(x):
            found: Tensor = _Renorm.apply(x, weight, bias, mean, var, batch_mean, batch_var, self.eps)  # type: ignore[no-untyped-call]
            return found
        # What is normalised by the batch is brought to the other statistics by a scale and a shift: in this way the
        # passes over the input are those of one batch norm. Renormalised, the two have no gradient.
        invstd = torch.rsqrt(var + self.eps)
        scale, shift = torch.sqrt(batch_var + self.eps) * invstd, (batch_mean - mean) * invstd
        if weight is not None:
            scale, shift = weight * scale, weight * shift
        shift = shift if bias is None else bias + shift
        return F.batch_norm(x, None, None, scale, shift, training=True, eps=self.eps)

    def _share_of_batch(self, rows: int, dtype: torch.dtype) -> Tensor | float:
        if self.settled and self.statistics.follows:
            return 0.0
        if self.statistics.memory is None or self.statistics.count is None:
            return 1.0 - self.statistics.source_share(rows)
        worth = (self.rows_followed.to(dtype) + self.statistics.count).clamp_max(self.statistics.memory)
        return rows / (worth + rows)

    def _hear(self, heard: "Heard") -> None:
        """Keep what the averages will be, until :func:`take_in`; at once where a graph is compiled."""
        self.heard = heard
        if torch.compiler.is_compiling():
            take_in([self])


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


@torch.no_grad()
def take_in(norms: Sequence[StreamNorm]) -> None:
    """Let averages become what the norms have heard; what is not finite does not enter.

    All of them together: a few operations on many numbers, where one norm after the other has many on a few.
    """
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


class _Renorm(torch.autograd.Function):
    """Batch norm with the values of some statistics and the gradient of those of the batch (Ioffe 2017).

    out = weight * (r * y + d) + bias, where y is normalised by the batch, r = std of the batch / std and
    d = (mean of the batch - mean) / std, both constants. One pass forward, as the moments are known. It has no second
    derivative.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        batch_mean: Tensor,
        batch_var: Tensor,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var, batch_mean, batch_var)
        ctx.eps, ctx.bias = eps, bias is not None
        return F.batch_norm(x, mean, var, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var, batch_mean, batch_var = ctx.saved_tensors
        batch_invstd, invstd = torch.rsqrt(batch_var + ctx.eps), torch.rsqrt(var + ctx.eps)
        ratio = invstd / batch_invstd
        wanted = [ctx.needs_input_grad[0], weight is not None, weight is not None or ctx.bias]
        by_x, by_y, by_bias = torch.ops.aten.native_batch_norm_backward(
            *(gradient, x, ratio if weight is None else weight * ratio),
            *(None, None, batch_mean, batch_invstd, True, ctx.eps, wanted),
        )
        by_weight = None
        if weight is not None:
            by_weight = torch.addcmul(by_y * ratio, by_bias, (batch_mean - mean) * invstd)
        return by_x if wanted[0] else None, by_weight, by_bias if ctx.bias else None, *[None] * 5


def _is_plain(x: Tensor) -> bool:
    """Whether the kernels of batch norm take a tensor as it is, with statistics in float32 or better."""
    return not torch.compiler.is_compiling() and (
        x.is_cuda or (x.device.type == "cpu" and x.dtype.itemsize >= 4)
    )


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


def _find_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (c,) of the channels, in float32 or better."""
    if x.device.type in ("cpu", "cuda") and not torch.compiler.is_compiling():
        return _Moments.apply(x)  # type: ignore[no-untyped-call,no-any-return]
    wide = x.float() if x.dtype.itemsize < 4 else x
    var, mean = torch.var_mean(wide, [0, *range(2, x.ndim)], correction=0)
    return mean, var


def _normalise_by_batch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if x.numel() > x.shape[1]:
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    # One value a channel, and no source statistics to fall back on: the centred value is zero.
    centred = torch.zeros_like(x) if bias is None else bias.view(1, -1, *[1] * (x.ndim - 2)).expand_as(x)
    return centred.to(x.dtype)
