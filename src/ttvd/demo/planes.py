"""Drawing on the plane of the model with two features: its diagrams, and the runs on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ttvd.demo.figures import GAMMA, Floats, Labels, PlaneData, Trace
from ttvd.geometry import Diagram, assign, distances, grid_labels, soft_labels
from ttvd.report import planes
from ttvd.report.planes import Box, Grid, Mask
from ttvd.report.style import new_panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = ("0", "1", "2")
TURNED = 150  # digits of each picture that shows all their views; more would hide each other


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
        labels, xs, ys = grid_labels(_split_clusters(diagram), self.box, self.resolution)
        return Grid(labels // diagram.views, xs, ys)

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
            planes.plot_sites(diagram, ax, names=NAMES)
        return ax

    def scatter(self, trace: Trace, ax: Axes, wrong: Mask) -> Axes:
        """The features of a run; of several views, those of the first digits. ``wrong`` is (v, n)."""
        count = TURNED if len(trace.features) > 1 else len(trace.labels)
        points = trace.features[:, :count].reshape(-1, 2)
        labels = np.tile(trace.labels[:count], len(trace.features))
        return planes.plot_points(points, labels, ax, wrong=wrong[:, :count].ravel())

    def misplaced(self, trace: Trace, name: str) -> Mask:
        """(v, n) mask of the features that lie in a cell of another class."""
        points = torch.from_numpy(trace.features.reshape(-1, 2))
        found = assign(points, self.data.diagrams[name], GAMMA).numpy().reshape(trace.features.shape[:2])
        mask: Mask = found != trace.labels
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
        return Grid(self._soften(np.stack([columns.ravel(), rows.ravel()], 1)).reshape(columns.shape), xs, ys)

    def count_uncertain_mistakes(self, run: str, count: int) -> int:
        """Mistakes of the head among the ``count`` upright features of highest entropy."""
        trace = self.data.traces[run]
        points = trace.features[0]
        highest = self._soften(points).argsort()[len(points) - count :]
        return int((self._name_nearest(points, "pd") != trace.labels)[highest].sum())

    def _soften(self, points: Floats) -> Floats:
        """Entropy (n,) of the Voronoi diagram's soft labels."""
        probs = soft_labels(-distances(torch.from_numpy(points), self.data.diagrams["vd"]), self.data.tau)
        entropy: Floats = torch.special.entr(probs).sum(1).numpy()
        return entropy

    def _name_nearest(self, points: Floats, name: str) -> Labels:
        diagram = self.data.diagrams[name]
        labels: Labels = assign(torch.from_numpy(points), _split_clusters(diagram)).numpy() // diagram.views
        return labels


def _split_clusters(diagram: Diagram) -> Diagram:
    """The same sites, each a class of its own."""
    return Diagram(diagram.sites, diagram.weights)
