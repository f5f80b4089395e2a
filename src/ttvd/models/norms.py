"""Normalisation at test time: where batch norm takes its statistics from, and which parameters adapt."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ttvd.models.instance_norm import InstanceAwareBatchNorm2d
from ttvd.models.split import split

Which = Literal["norm", "features", "all"]
_NORMS = (_BatchNorm, _InstanceNorm, InstanceAwareBatchNorm2d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


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

    Example:
        >>> Statistics.batch().source_share(64), Statistics(count=16).source_share(48)
        (0.0, 0.25)
    """

    prior: float = 0.0
    count: float | None = None
    momentum: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.prior <= 1.0:
            raise ValueError(
                f"prior is the share of the source statistics, between 0 and 1; got {self.prior}"
            )
        if self.count is not None and not self.count >= 0.0:
            raise ValueError(f"count is a number of source samples, at least 0; got {self.count}")
        if self.momentum is not None and not 0.0 < self.momentum <= 1.0:
            raise ValueError(f"momentum must lie in (0, 1]; got {self.momentum}")
        if self.count is not None and self.momentum is not None:
            raise ValueError("give either a pseudo-count or a momentum, not both")

    @classmethod
    def batch(cls) -> "Statistics":
        """Those of the batch at hand."""
        return cls(prior=0.0)

    @classmethod
    def parse(cls, text: str) -> "Statistics":
        """From a word: ``batch``, ``source``, ``prior:P``, ``count:N`` or ``momentum:M``.

        Example:
            >>> Statistics.parse("count:16")
            Statistics(prior=0.0, count=16.0, momentum=None)
        """
        kind, sign, number = text.partition(":")
        if not sign and kind in ("batch", "source"):
            return cls.batch() if kind == "batch" else cls.source()
        try:
            return cls(**{{"prior": "prior", "count": "count", "momentum": "momentum"}[kind]: float(number)})
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"statistics are batch, source, prior:P, count:N or momentum:M, got {text!r}"
            ) from error

    @classmethod
    def source(cls) -> "Statistics":
        """Those stored at training."""
        return cls(prior=1.0)

    def source_share(self, batch: int) -> float:
        """p for a batch of this size."""
        if self.momentum is not None:
            return 1.0 - self.momentum
        return self.prior if self.count is None else self.count / (self.count + batch)


class StreamNorm(_BatchNorm):
    """Batch norm in evaluation mode whose statistics follow a :class:`Statistics` policy.

    A channel of which the batch shows a single value has no variance: such an input is normalised with the source
    statistics. Statistics that are not finite never enter the running average.
    """

    def __init__(self, layer: _BatchNorm, statistics: Statistics) -> None:
        nn.Module.__init__(self)
        self.num_features, self.eps, self.momentum = layer.num_features, layer.eps, layer.momentum
        self.affine, self.track_running_stats = layer.affine, layer.track_running_stats
        self.weight, self.bias = layer.weight, layer.bias
        self.statistics = statistics
        self.following = False
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(layer, name))
        self.training = False

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"batch norm expects (b, c, ...), got a tensor of shape {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; updates the running average only inside :func:`following_stream`."""
        self._check_input_dim(input)
        known = self.running_mean is not None
        share = self.statistics.source_share(len(input)) if known else 0.0
        if known and (share == 1.0 or input.numel() == input.shape[1]):
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        if share == 0.0:
            return _normalise_by_batch(input, self.weight, self.bias, self.eps)
        return self._normalise_mixed(input, share)

    def _normalise_mixed(self, x: Tensor, share: float) -> Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        dims = [i for i in range(x.ndim) if i != 1]
        batch_var, batch_mean = torch.var_mean(x.float() if x.dtype.itemsize < 4 else x, dims, correction=0)
        mean = self.running_mean.lerp(batch_mean.to(self.running_mean.dtype), 1.0 - share)
        var = self.running_var.lerp(batch_var.to(self.running_var.dtype), 1.0 - share)
        if self.following and self.statistics.momentum is not None:
            with torch.no_grad():
                fine = mean.isfinite() & var.isfinite()
                self.running_mean.copy_(torch.where(fine, mean, self.running_mean))
                self.running_var.copy_(torch.where(fine, var, self.running_var))
        scale = torch.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        shape = [1, -1] + [1] * (x.ndim - 2)
        return (x * scale.view(shape) + shift.view(shape)).to(x.dtype)


def _normalise_by_batch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if x.numel() > x.shape[1]:
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    # One value a channel, and no source statistics to fall back on: the centred value is zero.
    centred = torch.zeros_like(x) if bias is None else bias.view(1, -1, *[1] * (x.ndim - 2)).expand_as(x)
    return centred.to(x.dtype)


def apply_statistics(model: nn.Module, statistics: Statistics) -> nn.Module:
    """Make every batch-norm layer below ``model`` follow a policy, in place; returns the model.

    A subclass with a forward of its own (norm and activation in one, as in timm) keeps it: its normalisation is
    done before it, and what is left of it is made the identity.
    """
    made: dict[nn.Module, nn.Module] = {}
    # Every name counts: a layer that is registered twice is exchanged in both places.
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(layer, _BatchNorm) or isinstance(layer, StreamNorm):
            continue
        if statistics.prior == 1.0 and statistics.count is None and layer.running_mean is None:
            raise ValueError(f"batch norm {name!r} has no source statistics (track_running_stats=False)")
        if layer not in made:
            made[layer] = _exchange(layer, statistics)
        if name:
            model.set_submodule(name, made[layer])
        else:
            model = made[layer]
    return model


def _exchange(layer: _BatchNorm, statistics: Statistics) -> nn.Module:
    new = StreamNorm(layer, statistics)
    if type(layer).forward is not _BatchNorm.forward and not isinstance(layer, nn.SyncBatchNorm):
        return nn.Sequential(new, _without_normalisation(layer))
    return new


def _without_normalisation(layer: _BatchNorm) -> _BatchNorm:
    """Strip a batch-norm subclass to what it does besides normalising."""
    reference = layer.running_mean if layer.running_mean is not None else layer.weight
    like = torch.zeros(layer.num_features, device=reference.device, dtype=reference.dtype)
    layer.running_mean, layer.running_var = like, torch.ones_like(like) - layer.eps
    layer.weight, layer.bias = None, None  # type: ignore[assignment]
    return layer.eval()


@contextmanager
def following_stream(model: nn.Module) -> Iterator[None]:
    """Let running averages learn from what is forwarded inside."""
    norms = [layer for layer in model.modules() if isinstance(layer, StreamNorm)]
    for layer in norms:
        layer.following = True
    try:
        yield
    finally:
        for layer in norms:
            layer.following = False


def running_buffers(model: nn.Module) -> set[str]:
    """Names of the running averages of the norms."""
    return {
        name
        for name, _ in model.named_buffers()
        if name.rpartition(".")[2] in ("running_mean", "running_var")
    }


def select_parameters(model: nn.Module, which: Which) -> set[str]:
    """Names of the parameters that adapt.

    Args:
        model: The classifier.
        which: ``"norm"`` the affine parameters of normalisation layers, ``"features"`` all but those of the head
            (as :func:`~ttvd.models.split` finds it), ``"all"`` everything.

    Raises:
        ValueError: Nothing is left to adapt.
    """
    names = {name for name, _ in model.named_parameters()}
    if which == "norm":
        norms = [prefix for prefix, layer in model.named_modules() if isinstance(layer, _NORMS)]
        inside = {f"{prefix}.{leaf}" if prefix else leaf for prefix in norms for leaf in ("weight", "bias")}
        names &= inside
    elif which == "features":
        head = {id(p) for p in split(model).linear.parameters()}
        names = {name for name, p in model.named_parameters() if id(p) not in head}
    elif which != "all":
        raise ValueError(f"parameters must be 'norm', 'features' or 'all', got {which!r}")
    if not names:
        raise ValueError(
            f"{type(model).__name__} has nothing to adapt: no normalisation layer with affine weights was found, and "
            "this method adapts those. Methods that train all features (`ttvd methods`) may serve."
        )
    return names


def freeze_layers(model: nn.Module, skip: Sequence[str]) -> None:
    """Take the parameters below the layers named in ``skip`` out of adaptation.

    Names are dotted prefixes: ``"layer4"`` is everything inside of it. What all names share is not counted, so that
    they fit a wrapped model (``model.layer4``) too; one that fits nothing is passed over.

    Raises:
        ValueError: Nothing is left to adapt.
    """
    parts = {name: name.split(".") for name, _ in model.named_parameters()}
    wrapper = sum(
        1 for _ in takewhile(lambda level: len(set(level)) == 1, zip(*parts.values(), strict=False))
    )
    for name, parameter in model.named_parameters():
        inner = ".".join(parts[name][wrapper:])
        if any(inner.startswith(f"{prefix}.") for prefix in skip):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"skip={tuple(skip)} leaves no normalisation layer to adapt; name fewer layers")
