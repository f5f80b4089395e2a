"""Batch norm at test time: where its statistics come from, and which gradient it has."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

_KINDS = {
    "batch": (),
    "source": (),
    "prior": ("prior",),
    "count": ("count",),
    "momentum": ("momentum",),
    "track": ("count", "memory"),
}
"""The words of :meth:`Statistics.parse`, and what the numbers behind them are."""


@dataclass(frozen=True)
class Statistics:
    """Where a batch-norm layer takes its mean and variance from at test time.

    mean = p * source + (1 - p) * batch, and the same for the variance (the biased one, so that p = 0 is exactly
    the batch norm of training). Group, layer and instance norm have no such choice and are left as they are.

    Attributes:
        prior: p, between 0 (the batch alone) and 1 (the source alone).
        count: If given, p = count / (count + batch size) instead: a pseudo-count of source samples (Schneider et
            al. 2020), which trusts a small batch less. The batch is what is forwarded: views count.
        momentum: If given, the statistics are an average that follows the stream:
            average <- (1 - momentum) * average + momentum * batch, starting at the source; ``prior`` is not used.
        memory: If given, the statistics are tracked: an average that follows the stream by evidence. It starts at
            the source, worth ``count`` samples; a batch of b enters with the weight b / (b + n), where n is what the
            average is worth, ``count`` and all samples since, but never more than ``memory``. Until that many all
            samples count alike, then the older ones less and less. Averaged are the means and the variances of
            batches; by how much the means of batches differ is not added to the variance. Views count here too: a
            method that forwards four views of an image wants four times the numbers.
        renorm: Values as these statistics say, but the gradient of batch norm on the batch (batch renormalisation,
            Ioffe 2017). A loss cannot be lowered by moving or scaling a feature of all samples under batch norm; it
            can with any share of other statistics, and on small batches losses do so until they collapse.

    Example:
        >>> Statistics.batch().source_share(64), Statistics(count=16).source_share(48)
        (0.0, 0.25)
        >>> tracked = Statistics(count=64, memory=1024, renorm=True)
    """

    prior: float = 0.0
    count: float | None = None
    momentum: float | None = None
    memory: float | None = None
    renorm: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.prior <= 1.0:
            raise ValueError(
                f"prior is the share of the source statistics, between 0 and 1; got {self.prior}"
            )
        if self.count is not None and not 0.0 <= self.count < math.inf:
            raise ValueError(f"count is a number of source samples, at least 0; got {self.count}")
        if self.momentum is not None and not 0.0 < self.momentum <= 1.0:
            raise ValueError(f"momentum must lie in (0, 1]; got {self.momentum}")
        if self.count is not None and self.momentum is not None:
            raise ValueError("give either a pseudo-count or a momentum, not both")
        if self.memory is not None and (self.count is None or not self.memory >= self.count):
            raise ValueError(
                "memory is the most samples that tracked statistics are worth, at least the count that they start "
                f"with; got memory={self.memory}, count={self.count}"
            )

    @classmethod
    def batch(cls) -> "Statistics":
        """Those of the batch at hand."""
        return cls(prior=0.0)

    @classmethod
    def source(cls) -> "Statistics":
        """Those stored at training."""
        return cls(prior=1.0)

    @classmethod
    def parse(cls, text: str) -> "Statistics":
        """From ``batch``, ``source``, ``prior:P``, ``count:N``, ``momentum:M`` or ``track:COUNT:MEMORY``.

        ``:renorm`` may follow each of them. ``str`` gives such a text back.

        Example:
            >>> Statistics.parse("count:16")
            Statistics(prior=0.0, count=16.0, momentum=None, memory=None, renorm=False)
            >>> str(Statistics.parse("track:64:inf:renorm"))
            'track:64:inf:renorm'
        """
        kind, *words = text.split(":")
        renorm = words[-1:] == ["renorm"]
        try:
            numbers = dict(zip(_KINDS[kind], map(float, words[: -1 if renorm else None]), strict=True))
        except (KeyError, ValueError) as error:
            raise ValueError(
                "statistics are batch, source, prior:P, count:N, momentum:M or track:COUNT:MEMORY, with or without "
                f":renorm behind; got {text!r}"
            ) from error
        return cls(**({"prior": 1.0} if kind == "source" else numbers), renorm=renorm)

    def __str__(self) -> str:
        if self.momentum is not None:
            kind = "momentum"
        elif self.count is not None:
            kind = "count" if self.memory is None else "track"
        else:
            kind = {0.0: "batch", 1.0: "source"}.get(self.prior, "prior")
        numbers = [repr(float(getattr(self, name))).removesuffix(".0") for name in _KINDS[kind]]
        return ":".join([kind, *numbers, *(["renorm"] if self.renorm else [])])

    @property
    def follows(self) -> bool:
        """Whether they are an average that follows the stream, and so a state."""
        return self.momentum is not None or self.memory is not None

    def source_share(self, batch: int) -> float:
        """p for a batch of this size; where an average follows the stream, for the first one."""
        if self.momentum is not None:
            return 1.0 - self.momentum
        return self.prior if self.count is None else self.count / (self.count + batch)


class Follower(nn.Module):
    """What may have averages that follow the stream.

    Attributes:
        following: Whether they learn from what comes.
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
        batch_mean, batch_var = _find_moments(x.detach() if self.statistics.renorm else x)
        dtype = batch_mean.dtype
        share = self._share_of_batch(len(x), dtype)
        mean = torch.lerp(running_mean.to(dtype), batch_mean, share)
        var = torch.lerp(running_var.to(dtype), batch_var, share)
        if self.following and self.statistics.follows and not self.settled:
            self._follow(mean, var, len(x))
        weight, bias = (None if part is None else part.to(dtype) for part in (self.weight, self.bias))
        if not torch.is_grad_enabled():
            return F.batch_norm(x, mean, var, weight, bias, eps=self.eps)
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

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor, rows: int) -> None:
        fine = mean.isfinite() & var.isfinite()
        for average, new in ((self.running_mean, mean), (self.running_var, var)):
            assert average is not None
            average.copy_(torch.where(fine, new, average))
        if self.statistics.memory is not None:
            self.rows_followed.add_(fine, alpha=rows)


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
