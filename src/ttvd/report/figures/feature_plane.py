"""Drawing on the plane of a model with two features: its diagrams, and the runs on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ttvd.bench.figures.values import Description, Floats, Labels, Mask, PlaneData, Trace
from ttvd.geometry import Diagram, assign, distances, grid_labels, soft_labels
from ttvd.report import planes
from ttvd.report.planes import Box, Grid
from ttvd.report.style import new_panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TURNED = 150
"""Images of each picture that shows all their views; more would hide each other."""


class Dropped(NamedTuple):
    """Features (m, 2) on which two diagrams disagree, of ``total``; their classes, and whether they are mistaken."""

    points: Floats
    labels: Labels
    mistakes: Mask
    total: int

    @property
    def kept(self) -> float:
        """Share of the features on which the diagrams agree."""
        return 1 - len(self.points) / self.total


@dataclass(frozen=True, eq=False)
class Plane:
    """Draws on the plane of a model with two features.

    Attributes:
        data: Diagrams and runs.
        facts: What is known of them: ``classes``, ``gamma``, ``tau``, ``views`` and others.
        resolution: Grid points per side, where cells have curved walls.
    """

    data: PlaneData
    facts: Description
    resolution: int = 400

    @property
    def names(self) -> list[str]:
        """Of the classes."""
        names: list[str] = self.facts["classes"]
        return names

    @cached_property
    def box(self) -> Box:
        """A square that holds nearly all features and every class mean."""
        points = [trace.features.reshape(-1, 2) for trace in self.data.traces.values()]
        return planes.find_box(np.concatenate(points), self.data.diagrams["civd"].sites.numpy())

    @cached_property
    def curved(self) -> Grid:
        """The cluster-induced Voronoi diagram on the grid."""
        return Grid(*grid_labels(self.data.diagrams["civd"], self.box, self.resolution, self.facts["gamma"]))

    def nearest(self, name: str) -> Grid:
        """The class of the nearest site of a diagram on the grid, clusters or not."""
        return planes.label_nearest(self.data.diagrams[name], self.box, self.resolution)

    def ground(self, name: str, title: str) -> Axes:
        """New axes with the cells of a diagram and, for Voronoi diagrams, its sites."""
        ax = new_panel()
        ax.set_title(title)
        diagram = self.data.diagrams[name]
        if name == "civd":
            planes.plot_contours(self.curved, planes.plot_regions(self.curved, ax), colour="white")
        elif name == "cipd":
            planes.plot_contours(
                self.nearest(name), planes.plot_cells(diagram, ax, box=self.box), colour="white"
            )
        else:
            planes.plot_cells(diagram, ax, box=self.box)
            planes.plot_boundaries(diagram, ax, box=self.box, colour="white")
        if name in ("vd", "civd"):
            planes.plot_sites(diagram, ax, names=self.names)
        return ax

    def scatter(self, trace: Trace, ax: Axes, wrong: Mask) -> Axes:
        """The features of a run; of several views, those of the first images. ``wrong`` is (v, n)."""
        count = TURNED if len(trace.features) > 1 else len(trace.labels)
        points = trace.features[:, :count].reshape(-1, 2)
        labels = np.tile(trace.labels[:count], len(trace.features))
        return planes.plot_points(points, labels, ax, wrong=wrong[:, :count].ravel())

    def misplaced(self, trace: Trace, name: str) -> Mask:
        """(v, n) mask of the features that lie in a cell of another class."""
        points = trace.features.reshape(-1, 2)
        if name == "civd":
            joint = assign(torch.from_numpy(points), self.data.diagrams[name], self.facts["gamma"])
            found: Labels = joint.numpy()
        else:
            found = self._name_nearest(points, name)
        mask: Mask = found.reshape(trace.features.shape[:2]) != trace.labels
        return mask

    def subtract(self, voronoi: str, power: str, run: str) -> Dropped:
        """What is dropped of a run where the nearest sites of two diagrams are of different classes."""
        trace = self.data.traces[run]
        points, labels = trace.features.reshape(-1, 2), np.tile(trace.labels, len(trace.features))
        first, second = (self._name_nearest(points, name) for name in (voronoi, power))
        apart = first != second
        return Dropped(points[apart], labels[apart], second[apart] != labels[apart], len(points))

    def entropy(self) -> Grid:
        """Entropy of the Voronoi diagram's soft labels on the grid."""
        xmin, ymin, xmax, ymax = self.box
        xs, ys = np.linspace(xmin, xmax, self.resolution), np.linspace(ymin, ymax, self.resolution)
        columns, rows = np.meshgrid(xs, ys)
        return Grid(self._temper(np.stack([columns.ravel(), rows.ravel()], 1)).reshape(columns.shape), xs, ys)

    def count_uncertain_mistakes(self, run: str, count: int) -> int:
        """Mistakes of the head among the ``count`` upright features of highest entropy."""
        trace = self.data.traces[run]
        points = trace.features[0]
        highest = self._temper(points).argsort()[len(points) - count :]
        return int((self._name_nearest(points, "pd") != trace.labels)[highest].sum())

    def _temper(self, points: Floats) -> Floats:
        """Entropy (n,) of the Voronoi diagram's soft labels."""
        away = -distances(torch.from_numpy(points), self.data.diagrams["vd"])
        entropy: Floats = torch.special.entr(soft_labels(away, self.facts["tau"])).sum(1).numpy()
        return entropy

    def _name_nearest(self, points: Floats, name: str) -> Labels:
        diagram = self.data.diagrams[name]
        single = Diagram(diagram.sites, diagram.weights)
        labels: Labels = assign(torch.from_numpy(points), single).numpy() // diagram.views
        return labels
