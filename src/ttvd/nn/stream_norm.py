"""Batch norm at test time, by statistics that follow a policy."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttvd.engine.fused_norm import Known, Scales, find_moments, kernels_take, renormalise, rescale
from ttvd.nn.norm_batch import Averages, NormBatch, PendingStats, commit, share_of_batch
from ttvd.nn.statistics import Statistics


class TracksStream(nn.Module):
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


class StreamNorm(TracksStream, _BatchNorm):
    """Batch norm in evaluation mode whose statistics follow a :class:`Statistics` policy.

    A channel of which the batch shows a single value has no variance: such an input is normalised with the source
    statistics, or what they have become along the stream. Statistics that are not finite never enter the running
    average.

    Under activation checkpointing the backward pass must come before the averages take the batch in, inside of
    :func:`following_stream`, as in the steps of this library; after that the batch would count twice in what is
    computed again.
    """

    rows_followed: Tensor
    pending: tuple[PendingStats, ...] = ()
    norm_batch: NormBatch | None = None

    def __init__(self, layer: _BatchNorm, statistics: Statistics) -> None:
        TracksStream.__init__(self)
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
        again = _is_differentiating()  # activation checkpointing: a batch that was pending comes once more
        dtype = x.dtype if x.dtype.itemsize >= 4 else torch.float32
        known = self._know(running_mean, running_var, dtype, again)
        batch_mean, batch_var = find_moments(x.detach() if self.statistics.renorm else x, known.mean)
        share = self._share_of_batch(known.rows, len(x), dtype)
        mean, var = _mix([known.mean, known.var], [batch_mean, batch_var], share)
        if self.following and self.statistics.follows and not (self.settled or again):
            # Until the pass is over: what a compiled graph wrote in place, its gradients might compute with once more.
            new = PendingStats(mean.detach(), var.detach(), len(x))
            if torch.compiler.is_compiling():
                # Not the averages: kernels that store them beside what gradients need are more than Triton 3.6 takes.
                new = PendingStats(batch_mean.detach(), batch_var.detach() + self.eps, len(x), mixed=False)
            self.pending = (*self.pending, new)
        weight, bias = (None if part is None else part.to(dtype) for part in (self.weight, self.bias))
        if not torch.is_grad_enabled():
            return F.batch_norm(x, mean, var, weight, bias, eps=self.eps)
        used = Known(weight, bias, mean, var, batch_mean, batch_var, self.eps)
        if self.statistics.renorm and kernels_take(x):
            return renormalise(x, used, Scales() if self.norm_batch is None else self.norm_batch.scales)
        return rescale(x, used)

    def _know(self, mean: Tensor, var: Tensor, dtype: torch.dtype, again: bool) -> Averages:
        """What is known before a batch: where a layer is used twice, the second time knows of the first."""
        if not (again or torch.compiler.is_compiling()):
            commit([self])
        rows = None if self.statistics.memory is None else self.rows_followed
        known = Averages(mean.to(dtype), var.to(dtype), rows)
        if torch.compiler.is_compiling():  # a graph writes nothing that it reads
            for pending in self.pending:
                known = known.follow(pending, self.statistics, self.eps)
        return known

    def _share_of_batch(self, followed: Tensor | None, rows: int, dtype: torch.dtype) -> Tensor | float:
        if self.settled and self.statistics.follows:
            return 0.0
        if followed is None or self.norm_batch is None or torch.compiler.is_compiling():
            return share_of_batch(self.statistics, followed, rows, dtype)
        return self.norm_batch.share(self, rows, dtype)


def _is_differentiating() -> bool:
    """Whether this is part of a backward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _mix(averages: list[Tensor], batch: list[Tensor], share: Tensor | float) -> list[Tensor]:
    """Both moments; in one operation, but for compilers, which fuse two, and gradients, which would keep averages."""
    if torch.compiler.is_compiling() or any(moments.requires_grad for moments in batch):
        return [torch.lerp(old, new, share) for old, new in zip(averages, batch, strict=True)]
    return list(torch._foreach_lerp(averages, batch, share if isinstance(share, float) else [share, share]))


def _normalise_by_batch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if x.numel() > x.shape[1]:
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    # One value a channel, and no source statistics to fall back on: the centred value is zero.
    centred = torch.zeros_like(x) if bias is None else bias.view(1, -1, *[1] * (x.ndim - 2)).expand_as(x)
    return centred.to(x.dtype)
