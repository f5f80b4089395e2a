"""The data behind the demo's plane figures: diagrams of the model with two features, and runs on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.adapters import Adapter, create
from ttvd.adapters.t3a import T3A
from ttvd.demo.job import Domain, stream
from ttvd.geometry import Diagram
from ttvd.models.sites import Sites
from ttvd.models.split import SplitModel, split
from ttvd.models.views import AggregatedViews, rotate
from ttvd.models.zoo import load

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]

VIEWS = 4
GAMMA = -0.8  # the paper's exponent
PLANE_DOMAIN = Domain(
    "gaussian_noise", 4
)  # hard enough to fail without adaptation, and clusters can still be seen
PLANE_LR = 5e-3  # SGD, for every method that takes gradient steps: the largest value of the paper's search
MOVED = 32  # digits of the batch whose moves are drawn
MOVE_STEPS = 10
MOVE_LR = {"vd": 0.1, "ttvd": 0.02}  # larger than in use, so that the eye sees where the steps lead


@dataclass(frozen=True, eq=False)
class Trace:
    """What a method saw and said along a stream.

    Attributes:
        features: (v, n, d) features of the views at the moment of prediction.
        predicted: (n,) classes.
        labels: (n,) true classes.
    """

    features: Floats
    predicted: Labels
    labels: Labels

    @property
    def wrong(self) -> npt.NDArray[np.bool_]:
        """(n,) mask of the mistakes."""
        mask: npt.NDArray[np.bool_] = self.predicted != self.labels
        return mask

    @property
    def error(self) -> float:
        """Share of mistakes."""
        return float(self.wrong.mean())


class Move(NamedTuple):
    """Features (n, 2) of one batch before and after, and the true classes."""

    before: Floats
    after: Floats
    labels: Labels


@dataclass(frozen=True, eq=False)
class PlaneData:
    """The diagrams of the plane model, and the runs that are drawn on them.

    Attributes:
        diagrams: ``vd``, ``pd`` (upright view), ``civd``, ``cipd`` (a site for each class and rotation), and ``t3a``
            (what its templates make of the plane at the end of the stream).
        traces: By label.
        moves: By label.
        tau: Temperature of the Voronoi diagram's soft labels.
    """

    diagrams: Mapping[str, Diagram]
    traces: Mapping[str, Trace]
    moves: Mapping[str, Move]
    tau: float


def trace(adapter: Adapter, batches: Iterable[tuple[Tensor, Tensor]]) -> Trace:
    """Run an adapter and keep the features that entered its head."""
    seen: list[Tensor] = []
    hook = split(adapter.model).linear.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].detach())
    )
    features, predicted, labels = [], [], []
    for x, y in batches:
        predicted.append(adapter(x).argmax(1))
        features.append(seen[-1].unflatten(0, (-1, len(x))))
        labels.append(y)
        seen.clear()
    hook.remove()
    joined = torch.cat(features, 1).double().numpy()
    return Trace(joined, torch.cat(predicted).numpy(), torch.cat(labels).numpy())


def compute_plane(images: Tensor, labels: Tensor, *, folder: Path | None = None, seed: int = 0) -> PlaneData:
    """Run the methods of the paper's Figure 1 on the plane model.

    Args:
        images: Clean digits of the stream, of the model's classes only.
        labels: Their classes.
        folder: Where the checkpoints are; those of the package unless given.
        seed: Of corruption and order.
    """
    source = load("digits-plane", folder)
    assert source.sites is not None
    parts, shifted = split(source.model), PLANE_DOMAIN.apply(images, seed)
    adapters = _build_adapters(parts, source.sites)
    traces = {name: trace(adapter, stream(shifted, labels, seed)) for name, adapter in adapters.items()}
    collected = adapters["t3a"]
    assert isinstance(collected, T3A)
    head = parts.linear.weight.detach(), parts.linear.bias.detach()
    diagrams = {
        "vd": source.sites.diagram(1),
        "pd": Diagram.from_linear(head[0][::VIEWS], head[1][::VIEWS]),
        "civd": source.sites.diagram(),
        "cipd": Diagram.from_linear(*head, views=VIEWS),
        "t3a": Diagram.from_linear(F.normalize(collected.features.sum(1), dim=1)),
    }
    moves = _compute_moves(parts, source.sites, next(stream(shifted, labels, seed)))
    return PlaneData(diagrams, traces, moves, source.sites.temperature("vd"))


def _build_adapters(parts: SplitModel, sites: Sites) -> dict[str, Adapter]:
    upright, four = parts.upright(VIEWS), AggregatedViews(parts, VIEWS)
    plain: dict[str, tuple[str, nn.Module]] = {
        "source": ("source", upright),
        "t3a": ("t3a", upright),
        "bn": ("bn", upright),
        "SLA + source": ("source", four),
        "SLA + bn": ("bn", four),
    }
    adapters = {name: create(method, model) for name, (method, model) in plain.items()}
    adapters["tent"] = create("tent", upright, lr=PLANE_LR, optimizer="sgd")
    for name in ("vd", "civd", "ttvd"):
        adapters[name] = create(name, parts, sites=sites, lr=PLANE_LR)
    return adapters


def _compute_moves(parts: SplitModel, sites: Sites, batch: tuple[Tensor, Tensor]) -> dict[str, Move]:
    """Where the features of one batch go: by its statistics, and then by gradient steps."""
    x, labels = batch[0][:MOVED], batch[1][:MOVED].numpy()
    turned = rotate(x, VIEWS)
    with torch.no_grad():
        fixed = parts.features(x)
    moves = {}
    for name, images, classes in (("vd", x, labels), ("ttvd", turned, np.tile(labels, VIEWS))):
        adapter = create(name, parts, sites=sites, lr=MOVE_LR[name], steps=MOVE_STEPS)
        assert isinstance(adapter.model, SplitModel)
        with torch.no_grad():
            before = adapter.model.features(images).double().numpy()
        adapter(x)
        with torch.no_grad():
            after = adapter.model.features(images).double().numpy()
        moves[name] = Move(before, after, classes)
    return {"bn": Move(fixed.double().numpy(), moves["vd"].before, labels), **moves}
