"""Slices: the plane through the sites of three classes, the diagrams on it, and features projected on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ttvd.bench.figures.paper import SLICES, STATISTICS, UNADAPTED
from ttvd.bench.figures.scene import (
    GAMMA,
    Array,
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
from ttvd.data.checks import check_choice
from ttvd.geometry import Diagram, assign, slice_plane
from ttvd.methods import find_method
from ttvd.nn.split import SplitModel
from ttvd.zoo.sites import Sites

ENOUGH = 60
"""Number of images of each of the three classes, as far as the set has them."""


@dataclass(frozen=True)
class SliceOptions(FigureOptions):
    """Options of the slices.

    Attributes:
        classes: Names or numbers of three classes; those that are confused most unless given.
        lr: Learning rate of the method that adapts; its default unless given.
    """

    classes: Sequence[str | int] = ()
    lr: float | None = None
    defaults = SLICES

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [self.classes] if isinstance(self.classes, str) else list(self.classes)
        if len(given) not in (0, 3) or len(set(map(str, given))) != len(given):
            raise ValueError(f"classes must be three different names or numbers, got {self.classes!r}")
        if self.lr is not None:
            check_positive("lr", self.lr)


@dataclass(frozen=True, eq=False)
class SliceData:
    """The plane through the Voronoi sites of three classes, with n images of these classes.

    Attributes:
        origin: (d,) origin of the plane.
        axes: (2, d) axes of the plane.
        diagrams: Exact slices of the diagrams ``vd``, ``pd``, ``civd`` and ``cipd``.
        labels: (n,) classes of the images, 0 to 2.
        states: By state of the model: the upright features on the plane, ``points`` (n, 2); their distances ``off``
            (n,) from it; and the classes (n,) ``vd``, ``pd``, ``civd`` and ``cipd`` that the diagrams give them in the
            space of all features. The last two look at all views.
    """

    origin: Floats
    axes: Floats
    diagrams: Mapping[str, Diagram]
    labels: Labels
    states: Mapping[str, Mapping[str, Array]]

    def to_arrays(self) -> Tree:
        """Return the values as named arrays."""
        diagrams = {name: diagram_to_arrays(diagram) for name, diagram in self.diagrams.items()}
        return {**vars(self), "diagrams": diagrams}

    @classmethod
    def from_arrays(cls, tree: Mapping[str, Any]) -> SliceData:
        """Return the values that :meth:`to_arrays` was called on."""
        diagrams = {name: diagram_from_arrays(arrays) for name, arrays in tree["diagrams"].items()}
        return cls(tree["origin"], tree["axes"], diagrams, tree["labels"], tree["states"])


def check(scene: Scene, options: SliceOptions) -> list[int]:
    """Return the numbers of the classes that are given; raise if the model does not know them."""
    if scene.sites.num_classes < 3 or scene.sites.dim < 2:
        raise ValueError(
            f"a slice needs 3 classes and 2 features, this model has {scene.sites.num_classes} and {scene.sites.dim}"
        )
    return [find_class(given, scene.description["classes"]) for given in options.classes]


def compute(scene: Scene, options: SliceOptions) -> tuple[SliceData, Description]:
    """Compute the values that the figure is drawn from, and facts about them."""
    parts, sites, stream = scene.parts, scene.sites, scene.stream
    methods = options.figure_methods()
    chosen = check(scene, options)
    if not chosen:
        chosen = choose_classes(trace(build_adapter(methods[STATISTICS], parts, sites), stream), sites)
    stream = stream.enrich(chosen, ENOUGH)
    defaults = [find_method(method.name).parameters().get("lr") for method in methods.values()]
    lr = options.lr or next((rate for rate in defaults if rate is not None), None)
    adapters = {label: build_adapter(method, parts, sites, lr=lr) for label, method in methods.items()}
    traces = {name: trace(adapter, stream) for name, adapter in adapters.items()}
    if (clean := stream.clean()) is not None:
        traces["clean"] = trace(adapters[UNADAPTED], clean)
    facts = {
        "gamma": GAMMA,
        "chosen": chosen,
        "given": bool(options.classes),
        "views": sites.views,
        "lr": lr,
        "images": len(stream.rows),
    }
    return cut_diagrams(make_diagrams(parts, sites), traces, chosen), facts


def find_class(given: str | int, names: Sequence[str]) -> int:
    """Return the number of a class that is given by name or number."""
    if isinstance(given, int) and 0 <= given < len(names):
        return given
    check_choice(str(given), names, "class")
    return list(names).index(str(given))


def choose_classes(seen: Trace, sites: Sites) -> list[int]:
    """Return the two classes that the Voronoi diagram confuses most, and the one that is confused most with them.

    Among classes that are confused equally often, it chooses those whose sites are nearest.
    """
    voronoi = sites.diagram(1)
    found = assign(torch.from_numpy(seen.features[0]).float(), voronoi).numpy()
    mistakes = np.zeros((sites.num_classes, sites.num_classes))
    np.add.at(mistakes, (seen.labels, found), 1)
    apart = torch.cdist(voronoi.sites, voronoi.sites).numpy()
    affinity = mistakes + mistakes.T - apart / (4 * apart.max())  # a mistake outweighs all distances
    np.fill_diagonal(affinity, -np.inf)
    pair = np.unravel_index(affinity.argmax(), affinity.shape)
    third = (affinity[pair[0]] + affinity[pair[1]]).argmax()
    return sorted(int(label) for label in (*pair, third))


def make_diagrams(parts: SplitModel, sites: Sites) -> dict[str, Diagram]:
    """Return the paper's four diagrams of a label-augmented model, in the space of its features."""
    upright, joint = power_diagrams(parts, sites.views)
    return {"vd": sites.diagram(1), "pd": upright, "civd": sites.diagram(), "cipd": joint}


def cut_diagrams(
    diagrams: Mapping[str, Diagram], traces: Mapping[str, Trace], chosen: Sequence[int]
) -> SliceData:
    """Cut diagrams along the plane through three Voronoi sites, and project features on it.

    Args:
        diagrams: The diagrams that :func:`make_diagrams` returns.
        traces: Features of all views, by state of the model; of the same images in the same order.
        chosen: The three classes.
    """
    origin, axes = span_plane(diagrams["vd"].sites[list(chosen)].double())
    labels = next(iter(traces.values())).labels
    kept = np.isin(labels, chosen)
    states = {}
    for name, seen in traces.items():
        z = torch.from_numpy(seen.features[:, kept])
        offsets = z[0] - origin
        points = offsets @ axes.T
        states[name] = {
            "points": points.numpy(),
            "off": (offsets - points @ axes).norm(dim=1).numpy(),
            **{kind: predict(z, diagram).numpy() for kind, diagram in diagrams.items()},
        }
    sliced = {name: slice_plane(diagram, origin, *axes) for name, diagram in diagrams.items()}
    places = np.array([list(chosen).index(label) for label in labels[kept]], dtype=np.int64)
    return SliceData(origin.numpy(), axes.numpy(), sliced, places, states)


def predict(z: Tensor, diagram: Diagram) -> Tensor:
    """Return the classes (n,) that a diagram gives to features (v, n, d): by all views, or by the upright one."""
    diagram = diagram.to(dtype=torch.float64)
    return assign(z if diagram.groups is not None else z[0], diagram, GAMMA)


def span_plane(corners: Tensor) -> tuple[Tensor, Tensor]:
    """Return the centre (d,) of three points (3, d), and axes (2, d) of their plane."""
    first, second = corners[1] - corners[0], corners[2] - corners[0]
    axes, sizes = torch.linalg.qr(torch.stack([first, second], 1))
    if abs(float(sizes[1, 1])) <= 1e-6 * float(second.norm()):
        raise ValueError("the sites of the three classes lie on a line; choose other classes")
    return corners.mean(0), (axes * sizes.diagonal().sign()).T.contiguous()
