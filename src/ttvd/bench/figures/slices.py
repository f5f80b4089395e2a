"""Slices: the plane through the sites of three classes, what diagrams cut out of it, and features projected on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ttvd.bench.figures.scene import GAMMA, Options, Scene, check_positive, power_diagrams, trace
from ttvd.bench.figures.values import Description, Trace, Tree, diagram_to_arrays
from ttvd.data.checks import check_choice
from ttvd.geometry import Diagram, assign, slice_plane
from ttvd.methods import create, find_method
from ttvd.nn.split import SplitModel
from ttvd.nn.views import AggregatedViews
from ttvd.zoo.sites import Sites

ENOUGH = 60
"""Images of each of the three classes that are wanted."""


@dataclass(frozen=True)
class SliceOptions(Options):
    """Of the slices.

    Attributes:
        classes: Names or numbers of three classes; those that are confused most unless given.
        lr: Learning rate of ttvd in the last picture; its default unless given.
    """

    classes: Sequence[str | int] = ()
    lr: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [self.classes] if isinstance(self.classes, str) else list(self.classes)
        if len(given) not in (0, 3) or len(set(map(str, given))) != len(given):
            raise ValueError(f"classes must be three different names or numbers, got {self.classes!r}")
        if self.lr is not None:
            check_positive("lr", self.lr)


def check_slices(scene: Scene, options: SliceOptions) -> list[int]:
    """The classes that are given, by their numbers; raise where the model does not know them."""
    if scene.sites.num_classes < 3 or scene.sites.dim < 2:
        raise ValueError(
            f"a slice needs 3 classes and 2 features, this model has {scene.sites.num_classes} and {scene.sites.dim}"
        )
    return [find_class(given, scene.description["classes"]) for given in options.classes]


def compute_slices(scene: Scene, options: SliceOptions) -> tuple[Description, Tree]:
    """What the figure is drawn from."""
    parts, sites, stream = scene.parts, scene.sites, scene.stream
    several = AggregatedViews(parts, sites.views, sites.views)
    chosen = check_slices(scene, options) or choose_classes(trace(create("bn", several), stream), sites)
    stream = stream.enrich(chosen, ENOUGH)
    lr = options.lr or find_method("ttvd").parameters()["lr"]
    adapters = {
        "source": create("source", several),
        "bn": create("bn", several),
        "ttvd": create("ttvd", parts, sites=sites, lr=lr),
    }
    traces = {name: trace(adapter, stream) for name, adapter in adapters.items()}
    if (clean := stream.clean()) is not None:
        traces["clean"] = trace(adapters["source"], clean)
    diagrams = make_diagrams(parts, sites)
    facts = {
        "gamma": GAMMA,
        "chosen": chosen,
        "given": bool(options.classes),
        "views": sites.views,
        "lr": lr,
        "images": len(stream.rows),
    }
    return facts, cut_diagrams(diagrams, traces, chosen)


def find_class(given: str | int, names: Sequence[str]) -> int:
    """The number of a class that is given by name or number."""
    if isinstance(given, int) and 0 <= given < len(names):
        return given
    check_choice(str(given), names, "class")
    return list(names).index(str(given))


def choose_classes(seen: Trace, sites: Sites) -> list[int]:
    """The two classes that the Voronoi diagram confuses most and the one that is confused most with them.

    Among those that are confused equally often, the classes whose sites are nearest.
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
    """The paper's four diagrams of a label-augmented model, in the space of its features."""
    upright, joint = power_diagrams(parts, sites.views)
    return {"vd": sites.diagram(1), "pd": upright, "civd": sites.diagram(), "cipd": joint}


def cut_diagrams(diagrams: Mapping[str, Diagram], traces: Mapping[str, Trace], chosen: Sequence[int]) -> Tree:
    """What the plane through three Voronoi sites shows of diagrams and features.

    Args:
        diagrams: ``vd``, ``pd``, ``civd``, ``cipd``, as :func:`make_diagrams` gives them.
        traces: Features of all views, by state of the model; of the same images in the same order.
        chosen: The three classes.

    Returns:
        ``origin`` (d,) and ``axes`` (2, d) of the plane; ``diagrams``, exact slices; ``labels`` (n,), 0 to 2, of the
        images of these classes; and of each of the ``states`` their upright features on the plane, ``points`` (n, 2),
        the distances ``off`` (n,) from it, and the classes (n,) ``vd``, ``pd``, ``civd`` and ``cipd`` that diagrams
        give them in the space of all features: the last two look at all views.
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
    sliced = {name: diagram_to_arrays(slice_plane(d, origin, *axes)) for name, d in diagrams.items()}
    return {
        "origin": origin.numpy(),
        "axes": axes.numpy(),
        "diagrams": sliced,
        "labels": np.array([list(chosen).index(label) for label in labels[kept]], dtype=np.int64),
        "states": states,
    }


def predict(z: Tensor, diagram: Diagram) -> Tensor:
    """Classes (n,) of images whose views have features (v, n, d): by all views, or the upright one if that is all."""
    diagram = diagram.to(dtype=torch.float64)
    return assign(z if diagram.groups is not None else z[0], diagram, GAMMA)


def span_plane(corners: Tensor) -> tuple[Tensor, Tensor]:
    """The centre (d,) of three points (3, d), and axes (2, d) of their plane, the first along two of the points."""
    first, second = corners[1] - corners[0], corners[2] - corners[0]
    axes, sizes = torch.linalg.qr(torch.stack([first, second], 1))
    if abs(float(sizes[1, 1])) <= 1e-6 * float(second.norm()):
        raise ValueError("the sites of the three classes lie on a line; choose other classes")
    return corners.mean(0), (axes * sizes.diagonal().sign()).T.contiguous()
