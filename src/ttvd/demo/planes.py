"""The figures of the demo's page on the plane model, with what to see in them. All numbers come from the data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from ttvd.data.corruptions import describe
from ttvd.demo.figures import GAMMA, MOVES, PLANE_DOMAIN, PLANE_LR, VIEWS, PlaneData, Trace
from ttvd.geometry import Diagram, assign, distances, grid_labels, soft_labels
from ttvd.report import planes
from ttvd.report.page import Exhibit, Panel, Strip, encode
from ttvd.report.planes import Box, Grid
from ttvd.report.style import class_colour, new_panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = ("0", "1", "2")
KEY = (*((class_colour(k), f"digit {name}") for k, name in enumerate(NAMES)), ("ring", "misclassified"))
TURNED = 150  # digits of each picture that shows all their views; more would hide each other


@dataclass(frozen=True, eq=False)
class Plane:
    """Draws on the plane of a model with two features.

    Attributes:
        data: Diagrams and runs.
        resolution: Grid points per side, where cells have curved walls.
    """

    data: PlaneData
    resolution: int = 400

    @cached_property
    def box(self) -> Box:
        """A square that holds nearly all features and every class mean."""
        points = [trace.features.reshape(-1, 2) for trace in self.data.traces.values()]
        low, high = np.quantile(np.concatenate(points), [0.003, 0.997], axis=0)
        sites = self.data.diagrams["civd"].sites.numpy()
        low, high = np.minimum(low, sites.min(0)), np.maximum(high, sites.max(0))
        middle, half = (low + high) / 2, float((high - low).max()) / 2 * 1.04
        return middle[0] - half, middle[1] - half, middle[0] + half, middle[1] + half

    @cached_property
    def curved(self) -> Grid:
        """The cluster-induced Voronoi diagram on the grid."""
        return Grid(*grid_labels(self.data.diagrams["civd"], self.box, self.resolution, GAMMA))

    def nearest(self, name: str) -> Grid:
        """The class of the nearest site of a diagram on the grid, clusters or not."""
        diagram = self.data.diagrams[name]
        labels, xs, ys = grid_labels(Diagram(diagram.sites, diagram.weights), self.box, self.resolution)
        return Grid(labels // diagram.views, xs, ys)

    def ground(self, name: str, title: str) -> Axes:
        """New axes with the cells of a diagram and, for Voronoi diagrams, its sites."""
        ax = new_panel()
        ax.set_title(title)
        if name == "civd":
            planes.plot_regions(self.curved, ax)
            planes.plot_contours(self.curved, ax)
        else:
            planes.plot_cells(self.data.diagrams[name], ax, box=self.box)
        if name in ("vd", "civd"):
            planes.plot_sites(self.data.diagrams[name], ax, names=NAMES)
        return ax

    def scatter(self, trace: Trace, ax: Axes, wrong: npt.NDArray[np.bool_]) -> Axes:
        """The features of a run; of several views, those of the first digits. ``wrong`` is (v, n)."""
        count = TURNED if len(trace.features) > 1 else len(trace.labels)
        points = trace.features[:, :count].reshape(-1, 2)
        labels = np.tile(trace.labels[:count], len(trace.features))
        return planes.plot_points(points, labels, ax, wrong=wrong[:, :count].ravel())

    def misplaced(self, trace: Trace, name: str) -> npt.NDArray[np.bool_]:
        """(v, n) mask of the features that lie in a cell of another class (point form)."""
        points = torch.from_numpy(trace.features.reshape(-1, 2))
        found = assign(points, self.data.diagrams[name], GAMMA).numpy().reshape(trace.features.shape[:2])
        mask: npt.NDArray[np.bool_] = found != trace.labels
        return mask

    def entropy(self) -> Grid:
        """Entropy of the Voronoi diagram's soft labels on the grid."""
        labels, xs, ys = grid_labels(self.data.diagrams["vd"], self.box, self.resolution)
        columns, rows = np.meshgrid(xs, ys)
        points = torch.from_numpy(np.stack([columns.ravel(), rows.ravel()], 1))
        probs = soft_labels(-distances(points, self.data.diagrams["vd"]), self.data.tau)
        return Grid(torch.special.entr(probs).sum(1).numpy().reshape(labels.shape), xs, ys)


def show_partitions(plane: Plane) -> Exhibit:
    """The paper's Figure 1."""
    one, four = plane.data.traces["source"], plane.data.traces["SLA + source"]
    panels = []
    for name, title, trace in (
        ("vd", "Voronoi", one),
        ("pd", "power", one),
        ("civd", "cluster-induced", four),
    ):
        wrong = plane.misplaced(trace, name)
        ax = plane.scatter(trace, plane.ground(name, f"{title}: {wrong.mean():.0%} astray"), wrong)
        panels.append(Panel(encode(ax), f"{title} diagram over the features of noisy digits"))
    runs = [_show_run(plane, *run) for run in RUNS]
    sigma = describe(PLANE_DOMAIN.corruption, PLANE_DOMAIN.severity, "imagenet")["scale"]
    errors = {name: trace.error for name, trace in plane.data.traces.items()}
    caption = (
        f"A small network squeezes each digit into two numbers, so its feature space can be drawn. Gaussian noise "
        f"(severity {PLANE_DOMAIN.severity}, standard deviation {sigma}) pushes the features across the walls of every "
        f"diagram in A. In B, T3A moves the walls, the others move the features: batch statistics alone bring the "
        f"error from {errors['source']:.1%} to {errors['bn']:.1%} with one view and to {errors['SLA + bn']:.1%} with "
        f"four; here the gradient steps of Tent, VD, CIVD and TTVD (all SGD, learning rate {PLANE_LR:g}) change little "
        f"on top, and looking at all four rotations is what separates the second row."
    )
    strips = (
        Strip(panels, 3, "A. Three ways to cut the plane, over the features of the unadapted model"),
        Strip(runs, 4, "B. Features when each method predicted them, and its error over the stream"),
    )
    return Exhibit("Cells in the feature plane (the paper's Figure 1)", caption, strips, KEY)


RUNS = (
    ("source", "pd", "before"),
    ("t3a", "t3a", "T3A"),
    ("bn", "pd", "batch norm"),
    ("tent", "pd", "Tent"),
    ("vd", "vd", "VD"),
    ("SLA + source", "cipd", "before, 4 views"),
    ("civd", "civd", "CIVD"),
    ("ttvd", "cipd", "TTVD"),
)


def _show_run(plane: Plane, name: str, ground: str, title: str) -> Panel:
    trace = plane.data.traces[name]
    wrong = np.broadcast_to(trace.wrong, trace.features.shape[:2])
    ax = plane.scatter(trace, plane.ground(ground, f"{title}: {trace.error:.1%}"), wrong)
    return Panel(encode(ax), f"Features and cells of {title}")


def show_subtraction(plane: Plane) -> Exhibit:
    """The paper's Figure 2."""
    ax = planes.plot_entropy(plane.entropy(), new_panel(), classes=len(NAMES))
    planes.plot_sites(plane.data.diagrams["vd"], ax, names=NAMES)
    ax.set_title("entropy of the soft labels")
    panels = [Panel(encode(ax), "Entropy landscape of the Voronoi diagram")]
    for first, second, title in (("vd", "pd", "one site a class"), ("civd", "cipd", "four sites a class")):
        dashed, solid = plane.nearest(first), plane.nearest(second)
        ax = planes.plot_regions(dashed, new_panel(), kept=dashed.values == solid.values)
        planes.plot_contours(dashed, ax, style="--")
        planes.plot_contours(solid, ax)
        planes.plot_sites(plane.data.diagrams[first], ax, names=NAMES)
        ax.set_title(f"kept: {title}")
        panels.append(Panel(encode(ax), f"Region on which Voronoi and power diagram agree, {title}"))
    caption = _describe_subtraction(plane)
    return Exhibit("Which samples to trust (the paper's Figure 2)", caption, (Strip(panels, 3),), KEY[:-1])


def _describe_subtraction(plane: Plane) -> str:
    trace = plane.data.traces["bn"]
    points = torch.from_numpy(trace.features[0])
    voronoi, power = (assign(points, plane.data.diagrams[name]).numpy() for name in ("vd", "pd"))
    kept = voronoi == power
    wrong = power != trace.labels
    inside, outside = wrong[kept].mean(), wrong[~kept].mean() if not kept.all() else float("nan")
    return (
        f"Left: the entropy of softmax(-distance / {plane.data.tau:.2f}) is high only in a narrow band along the walls "
        f"(the temperature was fitted on held-out source digits), so a threshold on it hardly tells safe samples from "
        f"lost ones. Middle and right: Voronoi walls are dashed, power walls solid, and only the deep region, where "
        f"both name the same class, is used to adapt. With one site a class that keeps {kept.mean():.0%} of the noisy "
        f"digits, of which {inside:.0%} are misclassified; of those that it drops, {outside:.0%} are. On the right the "
        f"nearest of a class's four sites decides."
    )


def show_structures(plane: Plane) -> Exhibit:
    """The paper's Figure 3."""
    four = plane.data.traces["SLA + bn"]
    panels = []
    for name, title in (("vd", "VD"), ("civd", "CIVD"), ("cipd", "CIPD")):
        nobody = np.zeros(four.features.shape[:2], dtype=bool)
        ax = plane.scatter(four, plane.ground(name, title), nobody)
        panels.append(Panel(encode(ax), f"{title} over the features of all four rotations"))
    moves = []
    for key, ground, title in (
        ("bn", "vd", "statistics of the batch"),
        ("vd", "vd", f"VD: {MOVES} steps"),
        ("ttvd", "cipd", f"TTVD: {MOVES} steps"),
    ):
        move = plane.data.moves[key]
        ax = planes.plot_moves(move.before, move.after, move.labels, plane.ground(ground, title))
        moves.append(Panel(encode(ax), f"Arrows: how {title} move the features of one batch"))
    caption = (
        f"VD has one site for each digit and sees upright images only. CIVD gives each digit a cluster of {VIEWS} "
        f"sites, one for each rotation, whose joint influence (exponent {GAMMA:g}, grid of {plane.resolution} x "
        f"{plane.resolution} points) bends the walls; CIPD takes sites and weights from the head, and its picture shows "
        f"the exact cells of all {VIEWS * len(NAMES)} class-rotation pairs. Below, one batch moves: its own statistics "
        f"bring it back to its sites, then {MOVES} steps on the same batch (ten to thirty times what a stream allows) "
        f"show the direction: away from the walls with VD, into the cell of the agreed digit and the known rotation "
        f"with TTVD."
    )
    strips = (Strip(panels, 3, "The same features on three diagrams"), Strip(moves, 3, "How one batch moves"))
    return Exhibit("From one site to weighted clusters (the paper's Figure 3)", caption, strips, KEY[:-1])
