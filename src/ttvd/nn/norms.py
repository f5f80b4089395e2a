"""Normalisation at test time: where batch norm takes its statistics from, and which parameters adapt."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ttvd.nn.instance_norm import InstanceAwareBatchNorm2d
from ttvd.nn.norm_batch import NormBatch, commit
from ttvd.nn.split import split
from ttvd.nn.statistics import Statistics as Statistics
from ttvd.nn.stream_norm import StreamNorm as StreamNorm
from ttvd.nn.stream_norm import TracksStream as TracksStream

Which = Literal["norm", "features", "all"]
_NORMS = (_BatchNorm, _InstanceNorm, InstanceAwareBatchNorm2d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


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
def following_stream(model: nn.Module, follow: bool = True) -> Iterator[None]:
    """Let running averages learn from what is forwarded inside, or inside of that again not."""
    with _flag_followers(model, "following", follow) as followers:
        norms = [part for part in followers if isinstance(part, StreamNorm)]
        commit(norms)  # what an outer block has pending stays, whatever happens inside
        outer, norm_batch = [norm.norm_batch for norm in norms], NormBatch(norms)
        for norm in norms:
            norm.norm_batch = norm_batch
        try:
            yield
            commit(norms)
        finally:
            for norm, before in zip(norms, outer, strict=True):
                norm.pending, norm.norm_batch = (), before
                if before is not None:
                    before.forget()  # what it knew of the averages


@contextmanager
def settled_stream(model: nn.Module) -> Iterator[None]:
    """Say that the averages have learnt from the batch that is forwarded inside: it must not count twice."""
    with _flag_followers(model, "settled", True):
        yield


@contextmanager
def _flag_followers(model: nn.Module, flag: str, value: bool) -> Iterator[list[TracksStream]]:
    followers = [part for part in model.modules() if isinstance(part, TracksStream)]
    before = [getattr(part, flag) for part in followers]
    for part in followers:
        setattr(part, flag, value)
    try:
        yield followers
    finally:
        for part, old in zip(followers, before, strict=True):
            setattr(part, flag, old)


def follows_stream(model: nn.Module) -> bool:
    """Whether something has averages that follow the stream."""
    return any(isinstance(part, TracksStream) and part.follows for part in model.modules())


def running_buffers(model: nn.Module) -> set[str]:
    """Names of the running averages of the norms, and of what tells how much they have seen."""
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
