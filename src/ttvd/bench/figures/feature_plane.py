"""The paper's plane: diagrams of a model with two features, and what methods make of its features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.bench.figures.scene import GAMMA, Batches, Options, Scene, check_positive, power_diagrams, trace
from ttvd.bench.figures.values import Description, Floats, Move, PlaneData, Tree
from ttvd.geometry import Diagram
from ttvd.methods import Adapter, create
from ttvd.methods.t3a import T3A
from ttvd.nn.split import SplitModel
from ttvd.nn.views import AggregatedViews, rotate
from ttvd.zoo.sites import Sites

LR = 5e-3  # SGD, for every method that takes gradient steps: the largest value of the paper's search
MOVED = 32  # images of the batch whose moves are drawn
MOVE_STEPS = 10
MOVE_LR = {"vd": 0.1, "ttvd": 0.02}  # larger than in use, so that the eye sees where the steps lead


@dataclass(frozen=True)
class PlaneOptions(Options):
    """Of the plane.

    Attributes:
        lr: Learning rate of all methods that take gradient steps.
    """

    lr: float = LR

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("lr", self.lr)


def check_plane(scene: Scene, _: PlaneOptions) -> None:
    """Raise unless the features of the model can be drawn as they are."""
    if scene.sites.dim != 2:
        raise ValueError(
            f"a plane needs a model with 2 features, this one has {scene.sites.dim}; kind 'slices' is for it"
        )


def compute_plane(scene: Scene, options: PlaneOptions) -> tuple[Description, Tree]:
    """What the figure is drawn from."""
    check_plane(scene, options)
    data, facts = trace_plane(scene.parts, scene.sites, scene.stream, options.lr)
    return facts, data.to_arrays()


def trace_plane(
    parts: SplitModel, sites: Sites, stream: Batches, lr: float = LR
) -> tuple[PlaneData, Description]:
    """Run the methods of the paper's Figure 1.

    Args:
        parts: A label-augmented model with two features.
        sites: Its sites.
        stream: Corrupted images.
        lr: Learning rate of all methods that take gradient steps.

    Returns:
        Diagrams, runs and moves; and the constants behind them.
    """
    adapters = _build_adapters(parts, sites, lr)
    traces = {name: trace(adapter, stream) for name, adapter in adapters.items()}
    collected = adapters["t3a"]
    assert isinstance(collected, T3A)
    upright, joint = power_diagrams(parts, sites.views)
    diagrams = {
        "vd": sites.diagram(1),
        "pd": upright,
        "civd": sites.diagram(),
        "cipd": joint,
        "t3a": Diagram.from_linear(F.normalize(collected.features.sum(1), dim=1).cpu()),
    }
    moves = _compute_moves(parts, sites, next(iter(stream)))
    facts = {
        "gamma": GAMMA,
        "tau": sites.temperature("vd"),
        "views": sites.views,
        "lr": lr,
        "moved": len(moves["bn"].labels),
        "move_steps": MOVE_STEPS,
        "move_lr": MOVE_LR,
    }
    return PlaneData(diagrams, traces, moves), facts


def _build_adapters(parts: SplitModel, sites: Sites, lr: float) -> dict[str, Adapter]:
    upright, several = parts.upright(sites.views), AggregatedViews(parts, sites.views, sites.views)
    plain: dict[str, tuple[str, nn.Module]] = {
        "source": ("source", upright),
        "t3a": ("t3a", upright),
        "bn": ("bn", upright),
        "SLA + source": ("source", several),
        "SLA + bn": ("bn", several),
    }
    adapters = {name: create(method, model) for name, (method, model) in plain.items()}
    adapters["tent"] = create("tent", upright, lr=lr, optimizer="sgd")
    for name in ("vd", "civd", "ttvd"):
        adapters[name] = create(name, parts, sites=sites, lr=lr)
    return adapters


def _compute_moves(parts: SplitModel, sites: Sites, batch: tuple[Tensor, Tensor]) -> dict[str, Move]:
    """Where the features of one batch go: by its statistics, and then by gradient steps."""
    x, labels = batch[0][:MOVED], batch[1][:MOVED].numpy()
    turned, repeated = rotate(x, sites.views), np.tile(labels, sites.views)
    fixed, moves = _look(parts, x), {}
    for name, images, classes in (("vd", x, labels), ("ttvd", turned, repeated)):
        adapter = create(name, parts, sites=sites, lr=MOVE_LR[name], steps=MOVE_STEPS)
        assert isinstance(adapter.model, SplitModel)
        before = _look(adapter.model, images)
        adapter(x)
        moves[name] = Move(before, _look(adapter.model, images), classes)
    return {"bn": Move(fixed, moves["vd"].before, labels), **moves}


@torch.no_grad()
def _look(parts: SplitModel, images: Tensor) -> Floats:
    features: Floats = parts.features(images).double().cpu().numpy()
    return features
