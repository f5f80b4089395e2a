"""Anchors: the input moments of a model's batch norms on clean data, measured before deployment.

A norm that was trained on augmented images stores the statistics of augmented images. The statistics of the same
images in use differ: random crops alone change the variance of early channels by a quarter and more. With the stored
statistics, the network is right nevertheless, because it was trained with them. With the statistics of a stream, even
of clean images, it is not: they remove a difference that belongs to the function of the network.

Anchored norms keep this difference. Let m and v be the moments on clean images in use, and m0 and v0 the stored ones:

    (x - m0) / sqrt(v0) * weight + bias  =  (x - m) / sqrt(v) * weight' + bias'

with weight' = weight * sqrt(v / v0) and bias' = bias + weight * (m - m0) / sqrt(v0). This is the same function, and its
statistics can now be replaced by those of a stream that has drifted.

The images in use depend on the method: upright images, or all views together.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttvd.nn.fingerprint import shared_prefix


@dataclass(frozen=True, eq=False)
class Anchors:
    """Mean and biased variance of the input of each norm, over clean images in use.

    Attributes:
        means: Means (c,), float64, of the channels of all norms that :func:`anchor_norms` changes, concatenated.
        variances: Variances (c,), float64.
        norms: Name and number of channels of each norm, in the order of the channels.
    """

    means: Tensor
    variances: Tensor
    norms: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        for name, tensor in (("means", self.means), ("variances", self.variances)):
            if tensor.ndim != 1 or tensor.shape != self.means.shape or tensor.dtype != torch.float64:
                raise ValueError(
                    f"{name} of anchors must be float64 (c,), got {tensor.dtype} {tuple(tensor.shape)}"
                )
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} of anchors must be finite")
        if bool((self.variances < 0).any()):
            raise ValueError("variances of anchors must not be negative")
        if len(dict(self.norms)) != len(self.norms):
            raise ValueError(f"the norms of anchors must have different names, got {self.norms}")
        if sum(size for _, size in self.norms) != len(self.means):
            raise ValueError(
                f"the norms of anchors do not have {len(self.means)} channels together: {self.norms}"
            )

    def __repr__(self) -> str:
        return f"Anchors(norms={len(self.norms)}, channels={len(self.means)})"


class NormMoments:
    """Running moments of the inputs of norms. A norm without any input keeps its stored moments.

    Args:
        norms: The norms to watch, by name.
        views: Number of views in a batch, one after the other, the upright view first.
    """

    def __init__(self, norms: dict[str, _BatchNorm], views: int) -> None:
        self._norms, self._views = norms, views
        self._found: dict[tuple[_BatchNorm, int], Moments] = {}

    def update(self, norm: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        """Add the input of a norm; this is a forward pre-hook."""
        assert isinstance(norm, _BatchNorm)
        x = args[0] if args else next(iter(kwargs.values()))
        for views in {1, self._views}:
            # An input with fewer rows than views does not consist of views: use all of it.
            seen = _measure(x[: len(x) * views // self._views or None].detach())
            before = self._found.get((norm, views))
            self._found[norm, views] = seen if before is None else _merge(before, seen)

    def anchors(self) -> dict[int, Anchors]:
        """Return the anchors of the upright view and of all views; empty if no norm can be anchored."""
        made = {}
        for views in {1, self._views} if self._norms else ():
            pairs = [
                self._found[norm, views][1:] if (norm, views) in self._found else _stored(norm)
                for norm in self._norms.values()
            ]
            kinds = tuple((name, norm.num_features) for name, norm in self._norms.items())
            means, variances = (torch.cat(moments) for moments in zip(*pairs, strict=True))
            made[views] = Anchors(means, variances, kinds)
        return made


Moments = tuple[int, Tensor, Tensor]
"""Number of values, their mean (c,) and their biased variance (c,)."""


@torch.no_grad()
def _measure(x: Tensor) -> Moments:
    wide = x.float() if x.dtype.itemsize < 4 else x
    var, mean = torch.var_mean(wide, [0, *range(2, x.ndim)], correction=0)
    return x.numel() // x.shape[1], mean.cpu().double(), var.cpu().double()


def _merge(one: Moments, other: Moments) -> Moments:
    share = other[0] / (one[0] + other[0])
    var = torch.lerp(one[2], other[2], share) + share * (1.0 - share) * (other[1] - one[1]).square()
    return one[0] + other[0], torch.lerp(one[1], other[1], share), var


@contextmanager
def watch_norms(model: nn.Module, views: int = 1) -> Iterator[NormMoments]:
    """Measure the inputs of a model's norms while it forwards clean images in evaluation mode.

    Args:
        model: The model; its hooks are removed afterwards.
        views: Number of views in each batch: all upright images first, then all images of the next view. The rows of
            a norm's input must have this order too, as in a convolutional network. If a norm gets parts of a batch one
            after the other, its anchors of the upright view are not those of upright images.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm1d(2)).eval()
        >>> with watch_norms(net) as moments:
        ...     _ = net(torch.tensor([[1.0, 2.0], [3.0, 2.0]]))
        >>> anchors = moments.anchors()[1]
        >>> anchors.means.tolist(), anchors.variances.tolist()
        ([2.0, 2.0], [1.0, 0.0])
    """
    norms = _anchored_norms(model)
    moments = NormMoments(norms, views)
    hooks = [norm.register_forward_pre_hook(moments.update, with_kwargs=True) for norm in norms.values()]
    try:
        yield moments
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def anchor_norms(model: nn.Module, anchors: Anchors) -> None:
    """Store the anchors in the norms of a model, in place, and adjust their affine parameters to keep its function.

    The tensors are replaced and not written to, so a model that shares them stays as it is. Two norms that shared
    parameters have separate ones afterwards.

    Args:
        model: The model whose norms were measured.
        anchors: The anchors of this model.

    Raises:
        ValueError: The anchors belong to another model.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm1d(2)).eval()
        >>> with watch_norms(net) as moments:
        ...     _ = net(torch.tensor([[-1.0, -1.0], [3.0, 3.0]]))
        >>> anchor_norms(net, moments.anchors()[1])
        >>> net[0].running_mean.tolist(), net(torch.tensor([[5.0, 1.0]])).round(decimals=3).tolist()
        ([1.0, 1.0], [[5.0, 1.0]])
    """
    norms = _anchored_norms(model)
    if dict(anchors.norms) != {name: norm.num_features for name, norm in norms.items()}:
        raise ValueError(
            f"the anchors are of {len(anchors.norms)} norms with {len(anchors.means)} channels that are not the "
            f"{len(norms)} norms of this model, by name and size: measure them again with ttvd.calibrate"
        )
    sizes = [size for _, size in anchors.norms]
    moments = zip(anchors.norms, anchors.means.split(sizes), anchors.variances.split(sizes), strict=True)
    for (name, _), mean, var in moments:
        norm = norms[name]
        old_mean, old_var = _stored(norm)
        weight, bias = norm.weight.detach().cpu().double(), norm.bias.detach().cpu().double()
        old_std, std = (old_var + norm.eps).sqrt(), (var + norm.eps).sqrt()
        for part, new in (
            ("running_mean", mean),
            ("running_var", var),
            ("weight", weight * std / old_std),
            ("bias", bias + weight * (mean - old_mean) / old_std),
        ):
            old: Tensor = getattr(norm, part)
            value = new.to(old, copy=True)
            if isinstance(old, nn.Parameter):
                value = nn.Parameter(value, old.requires_grad)
            setattr(norm, part, value)


def _anchored_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch norms with affine parameters and running statistics, by their alphabetically first name.

    A prefix that all names share, which a wrapper adds, is removed.
    """
    names: dict[_BatchNorm, list[str]] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if not isinstance(layer, _BatchNorm):
            continue
        if all(part is not None for part in (layer.running_mean, layer.weight, layer.bias)):
            names.setdefault(layer, []).append(name)
    start = shared_prefix([name for name, _ in model.named_parameters(remove_duplicate=False)])
    return {min(known)[start:]: layer for layer, known in names.items()}


def _stored(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return norm.running_mean.detach().cpu().double(), norm.running_var.detach().cpu().double()


def need_anchors(anchors: Anchors | None) -> Anchors:
    """Return the anchors; a ValueError says how to get them if there are none."""
    if anchors is None:
        raise ValueError(
            "anchored statistics need the anchors of the norms, and there are none. Methods with sites take them from "
            "sites that ttvd.calibrate returned; for other methods load a checkpoint as 'NAME+anchored', or call "
            "ttvd.anchor_norms on a copy of the model, and leave 'anchored' out of the statistics"
        )
    return anchors
