"""The paper's plane: diagrams of a model with two features, and what methods do to its features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ttvd.bench.figures.paper import PLANE, PLANE_MOVES, STATISTICS, FigureMethod
from ttvd.bench.figures.scene import (
    GAMMA,
    Batches,
    Description,
    FigureOptions,
    Floats,
    Labels,
    Scene,
    Trace,
    Tree,
    build_adapter,
    check_positive,
    diagram_from_arrays,
    diagram_to_arrays,
    power_diagrams,
    trace,
)
from ttvd.geometry import Diagram
from ttvd.nn.split import SplitModel
from ttvd.nn.views import rotate
from ttvd.zoo.sites import Sites

LR = 5e-3  # SGD, for every method that takes gradient steps: the largest value of the paper's search
MOVED = 32  # images of the batch whose moves are drawn
MOVE_STEPS = 10


@dataclass(frozen=True)
class PlaneOptions(FigureOptions):
    """Options of the plane.

    Attributes:
        lr: Learning rate of all methods that take gradient steps.
    """

    lr: float = LR
    defaults = PLANE

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("lr", self.lr)


class Move(NamedTuple):
    """Features (n, 2) of one batch before and after a method adapted, and the true classes (n,)."""

    before: Floats
    after: Floats
    labels: Labels


@dataclass(frozen=True, eq=False)
class PlaneData:
    """The diagrams of a model with two features, and the runs that are drawn on them.

    Attributes:
        diagrams: ``vd`` and ``pd`` of the upright view, ``civd`` and ``cipd`` with a site for each class and rotation.
            A method that replaces the head by templates adds its diagram at the end of the stream, under its label.
        traces: Runs by label.
        moves: Moves of one batch by label.
    """

    diagrams: Mapping[str, Diagram]
    traces: Mapping[str, Trace]
    moves: Mapping[str, Move]

    def to_arrays(self) -> Tree:
        """Return the values as named arrays."""
        return {
            "diagrams": {name: diagram_to_arrays(diagram) for name, diagram in self.diagrams.items()},
            "traces": {
                # The model computes features in float32, so they lose nothing.
                name: {**vars(run), "features": run.features.astype(np.float32)}
                for name, run in self.traces.items()
            },
            "moves": {name: move._asdict() for name, move in self.moves.items()},
        }

    @classmethod
    def from_arrays(cls, tree: Mapping[str, Any]) -> PlaneData:
        """Return the values that :meth:`to_arrays` was called on."""
        return cls(
            {name: diagram_from_arrays(arrays) for name, arrays in tree["diagrams"].items()},
            {
                name: Trace(arrays["features"].astype(np.float64), arrays["predicted"], arrays["labels"])
                for name, arrays in tree["traces"].items()
            },
            {name: Move(**arrays) for name, arrays in tree["moves"].items()},
        )


def check(scene: Scene, _: PlaneOptions) -> None:
    """Raise unless the model has two features."""
    if scene.sites.dim != 2:
        raise ValueError(
            f"a plane needs a model with 2 features, this one has {scene.sites.dim}; kind 'slices' is for it"
        )


def compute(scene: Scene, options: PlaneOptions) -> tuple[PlaneData, Description]:
    """Compute the values that the figure is drawn from, and facts about them."""
    check(scene, options)
    return trace_plane(scene.parts, scene.sites, scene.stream, options.lr, options.figure_methods())


def trace_plane(
    parts: SplitModel,
    sites: Sites,
    stream: Batches,
    lr: float = LR,
    methods: Mapping[str, FigureMethod] = PLANE,
) -> tuple[PlaneData, Description]:
    """Run the methods of the paper's Figure 1.

    Args:
        parts: A label-augmented model with two features.
        sites: Sites of the model.
        stream: Corrupted images.
        lr: Learning rate of all methods that take gradient steps.
        methods: Methods by label.

    Returns:
        Diagrams, runs and moves; and the constants behind them.
    """
    adapters = {label: build_adapter(method, parts, sites, lr=lr) for label, method in methods.items()}
    traces = {label: trace(adapter, stream) for label, adapter in adapters.items()}
    upright, joint = power_diagrams(parts, sites.views)
    diagrams = {"vd": sites.diagram(1), "pd": upright, "civd": sites.diagram(), "cipd": joint}
    for label, adapter in adapters.items():
        # A method whose scores are inner products with templates (k, d) declares them by this property.
        if (templates := getattr(adapter, "templates", None)) is not None:
            diagrams[label] = Diagram.from_linear(templates.detach().cpu())
    moves = _compute_moves(parts, sites, next(iter(stream)))
    facts = {
        "gamma": GAMMA,
        "tau": sites.temperature("vd"),
        "views": sites.views,
        "lr": lr,
        "moved": len(moves[STATISTICS].labels),
        "move_steps": MOVE_STEPS,
        "move_lr": {label: method.params["lr"] for label, method in PLANE_MOVES.items()},
    }
    return PlaneData(diagrams, traces, moves), facts


def _compute_moves(parts: SplitModel, sites: Sites, batch: tuple[Tensor, Tensor]) -> dict[str, Move]:
    """Where the features of one batch go: by its statistics, and then by gradient steps."""
    x, labels = batch[0][:MOVED], batch[1][:MOVED].numpy()
    moves = {STATISTICS: Move(_compute_features(parts, x), np.empty(0), labels)}
    for label, method in PLANE_MOVES.items():
        adapter = build_adapter(method, parts, sites, steps=MOVE_STEPS)
        assert isinstance(adapter.model, SplitModel)
        images = rotate(x, sites.views) if method.all_views else x
        before = _compute_features(adapter.model, images)
        adapter(x)
        after = _compute_features(adapter.model, images)
        moves[label] = Move(before, after, np.tile(labels, len(images) // len(x)))
        if not method.all_views:
            moves[STATISTICS] = moves[STATISTICS]._replace(after=before)
    return moves


@torch.no_grad()
def _compute_features(parts: SplitModel, images: Tensor) -> Floats:
    features: Floats = parts.features(images).double().cpu().numpy()
    return features
