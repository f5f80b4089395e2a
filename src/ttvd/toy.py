"""Toy worlds: a small model that has what a method needs, for conformance, soak and smoke tests."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ttvd.adapters import Adapter, create, methods
from ttvd.models.fingerprint import fingerprint
from ttvd.models.resnet import ResNet
from ttvd.models.rotation import RotationNet
from ttvd.models.sites import Sites
from ttvd.source import collect_features, estimate_fisher

CLASSES = 3
_DIM = 8
_TEMPERATURES = {"vd": 1.0, "pd": 1.0, "civd@-0.8": 0.05, "cipd@-0.8": 0.05, "civd@1": 1.0, "cipd@1": 4.0}
_ROTATION_LOSS = 1.4
_QUICK: dict[str, dict[str, Any]] = {
    "cotta": {"views": 3},
    "memo": {"views": 3},
    "note": {"period": 4, "capacity": 8},
    "rdumb": {"batches": 2},
    "rotta": {"period": 4, "capacity": 8},
    "ttt": {"copies": 4},
}
"""Fewer copies and shorter periods than the papers have, so that a few small batches show everything."""


def make_world(
    name: str, *, norm: str = "batch", rotations: bool = True, device: str = "cpu", **parameters: Any
) -> tuple[nn.Module, Callable[[], Adapter]]:
    """A model of 3 classes for images (b, 1, h, w), and how to build a method around it.

    The model is untrained but sure of itself, so that methods which keep confident samples keep some.

    Args:
        name: A registered method.
        norm: ``"batch"`` or ``"group"``; a method that needs instance-aware norms gets those.
        rotations: Whether the head of a model with sites tells rotations apart.
        device: Where everything lives.
        **parameters: Of the method.

    Example:
        >>> net, make = make_world("tent")
        >>> make()(torch.rand(4, 1, 8, 8)).shape
        torch.Size([4, 3])
    """
    needs = methods()[name].needs
    generator = torch.Generator().manual_seed(0)
    norm = "instance-aware" if "instance-aware norm" in needs else norm
    outputs = CLASSES * 4 if "sites" in needs and rotations else CLASSES
    sizes: dict[str, Any] = {"in_channels": 1, "widths": (8, _DIM), "blocks": (1, 1)}
    classifier = ResNet(outputs, **sizes, norm=norm, bias=True, generator=generator)
    with torch.no_grad():
        classifier.fc.weight.mul_(200.0)
    net: nn.Module = RotationNet(classifier, generator=generator) if "rotation head" in needs else classifier
    net = net.eval().to(device)
    made = _gather(needs, net, generator)
    chosen = {**_QUICK.get(name, {}), **parameters}
    return net, lambda: create(name, net, **made, **chosen)


def _gather(needs: frozenset[str], net: nn.Module, generator: torch.Generator) -> dict[str, Any]:
    """What the method needs of source data."""
    device = next(net.parameters()).device
    images = torch.rand(12, 1, 8, 8, generator=generator).to(device)
    labels = (torch.arange(12) % CLASSES).to(device)
    made: dict[str, Any] = {}
    if "sites" in needs:
        means = torch.randn(CLASSES, 4, _DIM, generator=generator).double()
        counts = torch.ones(CLASSES, 4, dtype=torch.int64)
        made["sites"] = Sites(
            means, counts, fingerprint(net), temperatures=_TEMPERATURES, rotation_loss=_ROTATION_LOSS
        )
    if "features" in needs:
        made["features"] = collect_features(net, (images, labels))
    if "fisher" in needs:
        made["fisher"] = estimate_fisher(net, images)
    return made
