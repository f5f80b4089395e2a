"""Normalisation layers at test time: their statistics, and which parameters adapt."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ttvd.engine.temporary import Temporarily as Temporarily
from ttvd.nn.instance_norm import InstanceAwareBatchNorm2d
from ttvd.nn.norm_batch import NormBatch, commit
from ttvd.nn.split import split
from ttvd.nn.statistics import Statistics as Statistics
from ttvd.nn.stream_norm import StreamNorm as StreamNorm
from ttvd.nn.stream_norm import TracksStream as TracksStream

Which = Literal["norm", "features", "all"]
_NORMS = (_BatchNorm, _InstanceNorm, InstanceAwareBatchNorm2d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def apply_statistics(model: nn.Module, statistics: Statistics) -> nn.Module:
    """Give every batch-norm layer of a model a policy for its statistics, in place; returns the model.

    A subclass with a forward pass of its own (norm and activation in one, as in timm) keeps it. The normalisation is
    done in a layer before it, and its own normalisation is made the identity.
    """
    made: dict[nn.Module, nn.Module] = {}
    # All names: a layer that is registered twice is exchanged in both places.
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
    """Make the normalisation of a batch-norm subclass the identity; the rest of its forward pass stays."""
    reference = layer.running_mean if layer.running_mean is not None else layer.weight
    like = torch.zeros(layer.num_features, device=reference.device, dtype=reference.dtype)
    layer.running_mean, layer.running_var = like, torch.ones_like(like) - layer.eps
    layer.weight, layer.bias = None, None  # type: ignore[assignment]
    return layer.eval()


class following_stream:  # noqa: N801 (used like a function)
    """Let the running averages of a model learn from batches that are forwarded inside of the block.

    Args:
        model: The model.
        follow: False to exclude a part of an outer block again.
    """

    def __init__(self, model: nn.Module, follow: bool = True) -> None:
        self._flags = _set_flag(model, "following", follow)

    def __enter__(self) -> None:
        parts = self._flags.__enter__()
        self._norms = [part for part in parts if isinstance(part, StreamNorm)]
        commit(self._norms)  # pending updates of an outer block stay, whatever happens inside
        self._outer, norm_batch = [norm.norm_batch for norm in self._norms], NormBatch(self._norms)
        for norm in self._norms:
            norm.norm_batch = norm_batch

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                commit(self._norms)
        finally:
            for norm, before in zip(self._norms, self._outer, strict=True):
                norm.pending, norm.norm_batch = (), before
                if before is not None:
                    before.forget()
            self._flags.__exit__()


def settled_stream(model: nn.Module) -> Temporarily[TracksStream]:
    """Forward a batch from which the running averages have learnt already, so that it does not count twice."""
    return _set_flag(model, "settled", True)


def _set_flag(model: nn.Module, flag: str, value: bool) -> Temporarily[TracksStream]:
    return Temporarily([part for part in model.modules() if isinstance(part, TracksStream)], flag, value)


def follows_stream(model: nn.Module) -> bool:
    """Whether a model has averages that follow the stream."""
    return any(isinstance(part, TracksStream) and part.follows for part in model.modules())


def running_buffers(model: nn.Module) -> set[str]:
    """Names of the buffers with running averages of the norms, and with the number of samples in them."""
    return {
        name
        for name, _ in model.named_buffers()
        if name.rpartition(".")[2] in ("running_mean", "running_var", "rows_followed")
    }


def select_parameters(model: nn.Module, which: Which) -> set[str]:
    """Names of the parameters that adapt.

    Args:
        model: The classifier.
        which: ``"norm"`` the affine parameters of normalisation layers, ``"features"`` all but those of the head
            (as :func:`~ttvd.nn.split` finds it), ``"all"`` everything.

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

    Names are dotted prefixes: ``"layer4"`` means everything inside of it. A prefix that all parameters share is
    ignored, so the names fit a wrapped model (``model.layer4``) too. A name that fits nothing has no effect.

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
