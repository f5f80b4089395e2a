"""Batch norm at test time, with statistics that follow a policy."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttvd.engine.fused_norm import NormStats, SharedFactors, find_moments, has_kernels, renormalise, rescale
from ttvd.nn.norm_batch import Averages, NormBatch, PendingStats, commit, share_of_batch
from ttvd.nn.statistics import Statistics


class TracksStream(nn.Module):
    """Base class of modules with averages that follow the stream.

    Attributes:
        following: Whether the averages learn from the present batch. ``following_stream`` sets it, and the averages
            are updated at its end.
        settled: Whether they have learnt from the present batch already, so that it must not count twice.
    """

    following: bool
    settled: bool

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.following = self.settled = False

    @property
    def follows(self) -> bool:
        """Whether the module has such averages."""
        return True


class StreamNorm(TracksStream, _BatchNorm):
    """Batch norm in evaluation mode whose statistics follow a :class:`Statistics` policy.

    A batch with a single value for each channel has no variance: it is normalised with the source statistics, or with
    the averages that have replaced them along the stream.

    With activation checkpointing, the backward pass must come before the averages are updated, inside of
    :func:`following_stream`, as in the steps of this library. Otherwise the batch would count twice when the forward
    pass is computed again.

    Attributes:
        evidence: How far the statistics may leave those of the source, a scalar from 0 to 1; None for all the way.
        counted_rows: Number of samples that the batch counts as in tracked averages; None for all of them.
    """

    rows_followed: Tensor
    pending: tuple[PendingStats, ...] = ()
    norm_batch: NormBatch | None = None
    evidence: Tensor | None = None
    counted_rows: Tensor | None = None
    source_mean: Tensor
    source_var: Tensor

    def __init__(self, layer: _BatchNorm, statistics: Statistics) -> None:
        TracksStream.__init__(self)
        self.num_features, self.eps, self.momentum = layer.num_features, layer.eps, layer.momentum
        self.affine, self.track_running_stats = layer.affine, layer.track_running_stats
        self.weight, self.bias = layer.weight, layer.bias
        self.statistics = statistics
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(layer, name))
        if statistics.memory is not None and layer.running_mean is not None:
            # Integers, which no change of precision rounds; for each channel, since one may be skipped.
            self.register_buffer("rows_followed", torch.zeros_like(layer.running_mean, dtype=torch.int64))
        if statistics.follows and layer.running_mean is not None:
            for name in ("mean", "var"):
                self.register_buffer(
                    f"source_{name}", getattr(layer, f"running_{name}").clone(), persistent=False
                )
        self.training = False

    @property
    def follows(self) -> bool:
        """Whether the statistics are averages that follow the stream."""
        return self.statistics.follows

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"batch norm expects (b, c, ...), got a tensor of shape {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise. The running averages learn inside of :func:`following_stream`, once from each batch.

        Inside of :func:`settled_stream` they are used as they are, since they contain the batch already.
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
        again = _is_differentiating()  # activation checkpointing: the same batch is forwarded once more
        dtype = x.dtype if x.dtype.itemsize >= 4 else torch.float32
        old = self._read_averages(running_mean, running_var, dtype, again)
        batch_mean, batch_var = find_moments(x.detach() if self.statistics.renorm else x, old.mean)
        rows = len(x) if self.counted_rows is None or self.statistics.memory is None else self.counted_rows
        share = self._share_of_batch(old.rows, rows, dtype)
        mean, var = _mix([old.mean, old.var], [batch_mean, batch_var], share)
        if self.following and self.statistics.follows and not (self.settled or again):
            # Pending until the pass is over: a compiled graph may read the averages again in its backward pass.
            new = PendingStats(mean.detach(), var.detach(), rows)
            if torch.compiler.is_compiling():
                # Moments instead of averages: Triton 3.6 fails on kernels that also store the averages.
                new = PendingStats(batch_mean.detach(), batch_var.detach() + self.eps, rows, mixed=False)
            self.pending = (*self.pending, new)
        if self.evidence is not None:
            mean = torch.lerp(self.source_mean.to(dtype), mean, self.evidence.to(dtype))
            var = torch.lerp(self.source_var.to(dtype), var, self.evidence.to(dtype))
        weight, bias = (None if part is None else part.to(dtype) for part in (self.weight, self.bias))
        if not torch.is_grad_enabled():
            return F.batch_norm(x, mean, var, weight, bias, eps=self.eps)
        used = NormStats(weight, bias, mean, var, batch_mean, batch_var, self.eps)
        if self.statistics.renorm and has_kernels(x):
            return renormalise(
                x, used, SharedFactors() if self.norm_batch is None else self.norm_batch.factors
            )
        return rescale(x, used)

    def _read_averages(self, mean: Tensor, var: Tensor, dtype: torch.dtype, again: bool) -> Averages:
        """The averages before a batch. A layer that is used twice in a pass has learnt from the first use."""
        if not (again or torch.compiler.is_compiling()):
            commit([self])
        rows = None if self.statistics.memory is None else self.rows_followed
        averages = Averages(mean.to(dtype), var.to(dtype), rows)
        if torch.compiler.is_compiling():  # a compiled graph must not write what it reads
            for pending in self.pending:
                averages = averages.updated(pending, self.statistics, self.eps)
        return averages

    def _share_of_batch(
        self, followed: Tensor | None, rows: Tensor | int, dtype: torch.dtype
    ) -> Tensor | float:
        if self.settled and self.statistics.follows:
            return 0.0
        if followed is None or self.norm_batch is None or torch.compiler.is_compiling():
            return share_of_batch(self.statistics, followed, rows, dtype)
        return self.norm_batch.share(self, rows, dtype)


def _is_differentiating() -> bool:
    """Whether this is part of a backward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _mix(averages: list[Tensor], batch: list[Tensor], share: Tensor | float) -> list[Tensor]:
    """Interpolate both moments in one operation; in two for compilers and where gradients are needed."""
    if torch.compiler.is_compiling() or any(moments.requires_grad for moments in batch):
        return [torch.lerp(old, new, share) for old, new in zip(averages, batch, strict=True)]
    return list(torch._foreach_lerp(averages, batch, share if isinstance(share, float) else [share, share]))


def _normalise_by_batch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if x.numel() > x.shape[1]:
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    # One value a channel, and no source statistics to fall back on: the centred value is zero.
    centred = torch.zeros_like(x) if bias is None else bias.view(1, -1, *[1] * (x.ndim - 2)).expand_as(x)
    return centred.to(x.dtype)
