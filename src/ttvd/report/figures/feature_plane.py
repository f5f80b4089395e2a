"""The paper's Figures 1 to 3 on the plane of a model with two features. All numbers come from the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ttvd.bench.figures.feature_plane import PlaneData
from ttvd.bench.figures.scene import Description, Floats, Labels, Mask, Trace
from ttvd.geometry import Diagram, assign, distances, grid_labels, margin, power_distances, soft_labels
from ttvd.report.document import Figure, Panel, PanelRow
from ttvd.report.figures import planar
from ttvd.report.figures.captions import describe_images, image_noun, list_names, name_class
from ttvd.report.figures.planar import Box, Grid
from ttvd.report.style import class_colour, new_panel, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_IMAGES = 150
"""Largest number of images in a picture that shows all their views; more would hide each other."""

# Diagram of the data, title of the panel, and run whose features are drawn. The diagram "cipd" has a weighted site for
# each class and rotation; its drawn cells are those of the power diagram of these sites, not the cells of Eq. 6.
PARTITIONS = (
    ("vd", "Voronoi", "source"),
    ("pd", "power", "source"),
    ("civd", "cluster-induced", "SLA + source"),
    ("cipd", "power, all sites", "SLA + source"),
)
# Run, diagram below it, title of the panel.
ONE_VIEW = (
    ("source", "pd", "before"),
    ("t3a", "t3a", "T3A"),
    ("bn", "pd", "batch statistics"),
    ("tent", "pd", "Tent"),
    ("vd", "vd", "VD"),
)
ALL_VIEWS = (
    ("SLA + source", "cipd", "before"),
    ("civd", "civd", "CIVD"),
    ("SLA + bn", "cipd", "batch statistics, no step"),
    ("ttvd", "cipd", "TTVD"),
)


def draw_feature_plane(facts: Description, arrays: Mapping[str, Any], resolution: int = 400) -> list[Figure]:
    """Draw the paper's Figures 1, 2 and 3.

    Args:
        facts: What is known of model and images.
        arrays: Diagrams, runs and moves as ``PlaneData.to_arrays`` returns them.
        resolution: Grid points per side for cells with curved walls.
    """
    plane = FeaturePlane(PlaneData.from_arrays(arrays), facts, resolution)
    return [show_partitions(plane), show_agreement(plane), show_structures(plane)]


class Dropped(NamedTuple):
    """Features (m, 2), of ``total``, on which two diagrams disagree; their classes, and a mask of mistakes."""

    points: Floats
    labels: Labels
    mistakes: Mask
    total: int

    @property
    def kept(self) -> float:
        """Share of the features on which the diagrams agree."""
        return 1 - len(self.points) / self.total


@dataclass(frozen=True, eq=False)
class FeaturePlane:
    """The plane of a model with two features.

    Attributes:
        data: Diagrams and runs.
        facts: Facts about them: ``classes``, ``gamma``, ``tau``, ``views`` and others.
        resolution: Grid points per side for cells with curved walls.
    """

    data: PlaneData
    facts: Description
    resolution: int = 400

    @property
    def names(self) -> list[str]:
        """Names of the classes."""
        names: list[str] = self.facts["classes"]
        return names

    @property
    def key(self) -> list[tuple[str, str]]:
        """Colours of the classes, and the ring of misclassified features."""
        named = [(class_colour(k), name_class(name)) for k, name in enumerate(self.names)]
        return [*named, ("ring", "misclassified")]

    @cached_property
    def box(self) -> Box:
        """A square with nearly all features and all class means."""
        points = [trace.features.reshape(-1, 2) for trace in self.data.traces.values()]
        return planar.find_box(np.concatenate(points), self.data.diagrams["civd"].sites.numpy())

    @cached_property
    def curved(self) -> Grid:
        """The cluster-induced Voronoi diagram on the grid."""
        return Grid(*grid_labels(self.data.diagrams["civd"], self.box, self.resolution, self.facts["gamma"]))

    def nearest(self, name: str) -> Grid:
        """Return the class of the nearest site of a diagram on the grid."""
        return planar.label_nearest(self.data.diagrams[name], self.box, self.resolution)

    def draw_cells(self, name: str, title: str) -> Axes:
        """Draw the cells of a diagram and, for Voronoi diagrams, its sites on new axes."""
        ax = new_panel()
        ax.set_title(title)
        diagram = self.data.diagrams[name]
        if name == "civd":
            planar.plot_contours(self.curved, planar.plot_regions(self.curved, ax), colour="white")
        elif name == "cipd":
            planar.plot_contours(
                self.nearest(name), planar.plot_cells(diagram, ax, box=self.box), colour="white"
            )
        else:
            planar.plot_cells(diagram, ax, box=self.box)
            planar.plot_boundaries(diagram, ax, box=self.box, colour="white")
        if name in ("vd", "civd"):
            planar.plot_sites(diagram, ax, names=self.names)
        return ax

    def draw_features(self, trace: Trace, ax: Axes, wrong: Mask) -> Axes:
        """Draw the features of a run, of several views those of the first images; ``wrong`` is a mask (v, n)."""
        count = MOST_IMAGES if len(trace.features) > 1 else len(trace.labels)
        points = trace.features[:, :count].reshape(-1, 2)
        labels = np.tile(trace.labels[:count], len(trace.features))
        return planar.plot_points(points, labels, ax, wrong=wrong[:, :count].ravel())

    def misplaced(self, trace: Trace, name: str) -> Mask:
        """Return a mask (v, n) of the features that lie in a cell of another class."""
        points = trace.features.reshape(-1, 2)
        if name == "civd":
            joint = assign(torch.from_numpy(points), self.data.diagrams[name], self.facts["gamma"])
            found: Labels = joint.numpy()
        else:
            found = self._assign_nearest(points, name)
        mask: Mask = found.reshape(trace.features.shape[:2]) != trace.labels
        return mask

    def drop(self, voronoi: str, power: str, run: str) -> Dropped:
        """Return the features of a run for which the nearest sites of two diagrams are of different classes."""
        trace = self.data.traces[run]
        points, labels = trace.features.reshape(-1, 2), np.tile(trace.labels, len(trace.features))
        first, second = (self._assign_nearest(points, name) for name in (voronoi, power))
        apart = first != second
        return Dropped(points[apart], labels[apart], second[apart] != labels[apart], len(points))

    def entropy_grid(self) -> Grid:
        """Return the entropy of the Voronoi diagram's soft labels on the grid."""
        xmin, ymin, xmax, ymax = self.box
        xs, ys = np.linspace(xmin, xmax, self.resolution), np.linspace(ymin, ymax, self.resolution)
        columns, rows = np.meshgrid(xs, ys)
        points = np.stack([columns.ravel(), rows.ravel()], 1)
        return Grid(self._entropy(points).reshape(columns.shape), xs, ys)

    def count_uncertain_mistakes(self, run: str, count: int) -> int:
        """Return the number of mistakes of the head among the ``count`` upright features of highest entropy."""
        trace = self.data.traces[run]
        points = trace.features[0]
        highest = self._entropy(points).argsort()[len(points) - count :]
        return int((self._assign_nearest(points, "pd") != trace.labels)[highest].sum())

    def _entropy(self, points: Floats) -> Floats:
        """Return the entropy (n,) of the Voronoi diagram's soft labels."""
        scores = -distances(torch.from_numpy(points), self.data.diagrams["vd"])
        entropy: Floats = torch.special.entr(soft_labels(scores, self.facts["tau"])).sum(1).numpy()
        return entropy

    def _assign_nearest(self, points: Floats, name: str) -> Labels:
        diagram = self.data.diagrams[name]
        single = Diagram(diagram.sites, diagram.weights)
        labels: Labels = assign(torch.from_numpy(points), single).numpy() // diagram.views
        return labels


def show_partitions(plane: FeaturePlane) -> Figure:
    """Draw the paper's Figure 1: diagrams over corrupted features, and what methods make of the features."""
    facts, noun, views = plane.facts, image_noun(plane.names), plane.facts["views"]
    error = {name: trace.error for name, trace in plane.data.traces.items()}
    caption = (
        f"A small network maps each {noun} to two features, so its feature space can be drawn: {facts['domain']} "
        f"moves the features across the walls of every diagram (A). T3A moves the walls, all other methods move the "
        f"features. With one view (B), statistics of the batch bring the error from {error['source']:.1%} to "
        f"{error['bn']:.1%}. With all {views} rotations (C), they bring it to {error['SLA + bn']:.1%} without a "
        f"gradient step; CIVD has {error['civd']:.1%} and TTVD {error['ttvd']:.1%}."
    )
    details = (
        f"{noun.capitalize()}s {list_names(plane.names)}; {describe_images(facts)}. Gradient methods use SGD with "
        f"learning rate {facts['lr']:g}. Cells are exact, except those of the cluster-induced Voronoi diagram: "
        f"exponent {facts['gamma']:g} on {plane.resolution} x {plane.resolution} points. “All sites” is the power "
        f"diagram of the head's sites for all pairs of {noun} and rotation; CIPD's own cells are not drawn. The sites "
        f"of the power diagrams lie close to the origin of the features and are left out. In C each of {MOST_IMAGES} "
        f"{noun}s is drawn {views} times, with a ring if the joint prediction is wrong."
    )
    rows = (
        PanelRow(
            [_show_partition(plane, *partition) for partition in PARTITIONS],
            4,
            "A. Four ways to partition the plane, over the features of the unadapted model",
        ),
        PanelRow(
            # A method without a head of its own at the end of the stream has no diagram and is left out.
            [_show_run(plane, *run) for run in ONE_VIEW if run[1] in plane.data.diagrams],
            5,
            "B. One view: features at the time of prediction, the cells of each method, and its error over the stream",
        ),
        PanelRow(
            [_show_run(plane, *run) for run in ALL_VIEWS],
            4,
            f"C. All {views} rotations of each {noun}: “no step” is the same model with batch statistics alone",
        ),
    )
    return Figure("Cells in the feature plane (the paper's Figure 1)", caption, rows, plane.key, details)


def _show_partition(plane: FeaturePlane, name: str, title: str, run: str) -> Panel:
    trace = plane.data.traces[run]
    wrong = plane.misplaced(trace, name)
    share = f"{wrong.mean():.0%} misplaced"
    ax = plane.draw_features(trace, plane.draw_cells(name, f"{title}: {share}"), wrong)
    return Panel(
        to_svg(ax), f"{title} diagram over the features of corrupted {image_noun(plane.names)}s: {share}"
    )


def _show_run(plane: FeaturePlane, name: str, diagram: str, title: str) -> Panel:
    trace = plane.data.traces[name]
    wrong = np.broadcast_to(trace.wrong, trace.features.shape[:2])
    ax = plane.draw_features(trace, plane.draw_cells(diagram, f"{title}: {trace.error:.1%}"), wrong)
    return Panel(to_svg(ax), f"Features and cells of {title}: error {trace.error:.1%}")


def show_agreement(plane: FeaturePlane) -> Figure:
    """Draw the paper's Figure 2: the samples on which Voronoi and power diagram agree."""
    voronoi, noun = plane.data.diagrams["vd"], image_noun(plane.names)
    ax = planar.plot_entropy(plane.entropy_grid(), new_panel((3.6, 4.4)), classes=len(plane.names))
    planar.plot_boundaries(voronoi, ax, box=plane.box, colour="white")
    planar.plot_sites(voronoi, ax, names=plane.names)
    ax.set_title("entropy of the soft labels")
    panels = [
        Panel(to_svg(ax), "Entropy of the Voronoi diagram's soft labels over the plane"),
        _show_agreement(plane, "vd", "pd", "bn"),
        _show_agreement(plane, "civd", "cipd", "SLA + bn"),
    ]
    dropped = plane.drop("vd", "pd", "bn")
    count = len(dropped.points)
    caption = (
        f"Left: the entropy of a soft label is high along the walls and falls quickly towards the sites. Middle and "
        f"right: walls of the Voronoi diagram are dashed, of the power diagram solid; samples where the two disagree "
        f"(dots) are not used to adapt. Of the {count} {noun}s that this drops in the middle, "
        f"{dropped.mistakes.sum()} are misclassified; of the {count} with the highest entropy, "
        f"{plane.count_uncertain_mistakes('bn', count)} are."
    )
    details = (
        f"Soft labels: softmax(-distance / {plane.facts['tau']:.2f}), the temperature fitted on held-out source data. "
        f"Misclassified: by the head, with batch statistics; {dropped.total} {noun}s, upright, in the middle. On the "
        f"right the nearest of each class's {plane.facts['views']} sites decides, and all rotations of each {noun} "
        "count."
    )
    title = "Samples that are used to adapt (the paper's Figure 2)"
    return Figure(title, caption, (PanelRow(panels, 3),), plane.key, details)


def _show_agreement(plane: FeaturePlane, voronoi: str, power: str, run: str) -> Panel:
    dashed, solid = plane.nearest(voronoi), plane.nearest(power)
    ax = planar.plot_regions(dashed, new_panel(), kept=dashed.values == solid.values)
    planar.plot_contours(solid, planar.plot_contours(dashed, ax, style="--"))
    dropped = plane.drop(voronoi, power, run)
    planar.plot_points(dropped.points, dropped.labels, ax, wrong=dropped.mistakes)
    planar.plot_sites(plane.data.diagrams[voronoi], ax, names=plane.names)
    sites = "one site" if voronoi == "vd" else f"{plane.facts['views']} sites"
    ax.set_title(f"{sites} a class: {dropped.kept:.0%} kept")
    return Panel(to_svg(ax), f"Region on which Voronoi and power diagram agree, {sites} a class")


def show_structures(plane: FeaturePlane) -> Figure:
    """Draw the paper's Figure 3: three structures over the same features, and how a batch moves."""
    facts, noun, views = plane.facts, image_noun(plane.names), plane.facts["views"]
    features, walls = plane.data.traces["SLA + bn"], plane.data.diagrams["vd"]
    no_ring = np.zeros(features.features.shape[:2], dtype=bool)
    panels = []
    for name, title in (("vd", "VD"), ("civd", "CIVD"), ("cipd", "power diagram of all sites")):
        ax = plane.draw_features(features, plane.draw_cells(name, title), no_ring)
        panels.append(Panel(to_svg(ax), f"{title} over the features of all rotations"))
    away = [margin(torch.from_numpy(z), walls).mean() for z in plane.data.moves["vd"][:2]]
    moved = plane.data.moves["ttvd"]
    loss = [_cross_entropy(z, moved.labels, plane.data.diagrams["cipd"]) for z in moved[:2]]
    caption = (
        f"VD has one site for each {noun}, of its upright view, and cuts through the rotated ones; CIVD gives each "
        f"{noun} a cluster of {views} sites and bends its walls around it; the power diagram takes weighted sites from "
        f"the head, which CIPD joins to clusters. Below, a batch is moved back by its own statistics; then the VD loss "
        f"moves it away from the walls (mean distance {away[0]:.1f} before, {away[1]:.1f} after), and TTVD moves each "
        f"view towards the cell of the agreed {noun} and its known rotation (mean cross-entropy to the true one "
        f"{loss[0]:.2f} before, {loss[1]:.2f} after)."
    )
    rates = facts["move_lr"]
    details = (
        f"Features of all {views} rotations, with batch statistics. CIVD: joint influence with exponent "
        f"{facts['gamma']:g} on {plane.resolution} x {plane.resolution} points. Power diagram: exact cells of its "
        f"{views * len(plane.names)} pairs of {noun} and rotation. Arrows: {facts['move_steps']} steps on a batch of "
        f"{facts['moved']} with learning rates that make the direction visible, {rates['vd']:g} (VD) and "
        f"{rates['ttvd']:g} (TTVD)."
    )
    moves = (
        ("bn", "vd", "statistics of the batch"),
        ("vd", "vd", f"VD, {facts['move_steps']} steps"),
        ("ttvd", "cipd", f"TTVD, {facts['move_steps']} steps"),
    )
    rows = (
        PanelRow(panels, 3, "The same features on three diagrams"),
        PanelRow([_show_move(plane, *move) for move in moves], 3, "How one batch moves"),
    )
    title = "From one site to weighted clusters (the paper's Figure 3)"
    return Figure(title, caption, rows, plane.key[:-1], details)


def _show_move(plane: FeaturePlane, name: str, diagram: str, title: str) -> Panel:
    move = plane.data.moves[name]
    ax = planar.plot_moves(move.before, move.after, move.labels, plane.draw_cells(diagram, title))
    return Panel(to_svg(ax), f"Arrows: how the features of one batch move by {title}")


def _cross_entropy(points: Floats, labels: Labels, joint: Diagram) -> float:
    """Return the mean cross-entropy of the views (view-major) to the cells of their own class and rotation."""
    views = torch.arange(joint.views).repeat_interleave(len(points) // joint.views)
    scores = -power_distances(torch.from_numpy(points), Diagram(joint.sites, joint.weights))
    return float(F.cross_entropy(scores, torch.from_numpy(labels) * joint.views + views))
