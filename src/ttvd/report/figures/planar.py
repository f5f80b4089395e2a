"""Drawing on a plane of features: cells, walls, points, sites, entropy and moves.

Each ``plot_*`` function takes data and axes, draws, and returns the axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from ttvd.geometry import Diagram, cells, grid_labels
from ttvd.report.style import FAINT, INK, MUTED, PALETTE, class_colour, lighten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Box = tuple[float, float, float, float]

MOST_PATHS = 4000
"""Largest number of points that are drawn as paths; more are drawn as a bitmap."""

SHORT = 3
"""Largest number of letters of a name that fits on a site."""

NAMED_SHARE = 0.01
"""Share of a picture above which a region gets a name."""

SIDES = (("right", "left"), ("top", "bottom"))

PALE, DEEP = 0.78, 0.42
"""Share of white in the colour of a cell, and in the part of a cell that a filter keeps."""


class Grid(NamedTuple):
    """Values (r, r) at the points of a grid: a row for each y, a column for each x.

    ``ttvd.geometry.grid_labels`` gives the three in this order.
    """

    values: npt.NDArray[np.float64] | npt.NDArray[np.int64]
    xs: Floats
    ys: Floats


def find_box(points: Floats, sites: Floats, *, margin: float = 0.04) -> Box:
    """Return a square with nearly all points (n, 2) and all sites (s, 2); the margin is a share of its side."""
    low, high = np.quantile(points, [0.003, 0.997], axis=0)
    low, high = np.minimum(low, sites.min(0)), np.maximum(high, sites.max(0))
    middle, half = (low + high) / 2, float((high - low).max()) / 2 * (1 + margin)
    return middle[0] - half, middle[1] - half, middle[0] + half, middle[1] + half


def label_nearest(diagram: Diagram, box: Box, resolution: int) -> Grid:
    """Return the class of the nearest site (by power distance, if there are weights) at the points of a grid."""
    labels, xs, ys = grid_labels(Diagram(diagram.sites, diagram.weights), box, resolution)
    return Grid(labels // diagram.views, xs, ys)


def plot_cells(diagram: Diagram, ax: Axes, *, box: Box) -> Axes:
    """Fill the exact cells of a Voronoi or power diagram, each in the colour of its class.

    Args:
        diagram: Diagram in two dimensions; with groups, the cells of a class share a colour.
        ax: Axes to draw on.
        box: Region to show: (xmin, ymin, xmax, ymax).

    Example:
        >>> import torch
        >>> from matplotlib.figure import Figure
        >>> ax = plot_cells(Diagram(torch.eye(2)), Figure().subplots(), box=(-1, -1, 2, 2))
        >>> len(ax.patches)
        2
    """
    from matplotlib.patches import Polygon

    groups = range(diagram.num_sites) if diagram.groups is None else diagram.groups.tolist()
    for label, polygon in zip(groups, cells(diagram, box), strict=True):
        if len(polygon):
            fill = lighten(class_colour(label), PALE)
            ax.add_patch(Polygon(polygon, facecolor=fill, edgecolor="white", linewidth=1.0, zorder=0))
    return _frame(ax, box)


def plot_boundaries(diagram: Diagram, ax: Axes, *, box: Box, style: str = "-", colour: str = INK) -> Axes:
    """Draw the exact walls between the cells of all sites, in a line style and colour of matplotlib."""
    from matplotlib.collections import PolyCollection

    # A larger box keeps its own sides, which are no walls, out of the picture.
    xmin, ymin, xmax, ymax = box
    dx, dy = (xmax - xmin) / 10, (ymax - ymin) / 10
    found = [cell for cell in cells(diagram, (xmin - dx, ymin - dy, xmax + dx, ymax + dy)) if len(cell)]
    lines: Any = {"facecolors": "none", "edgecolors": colour, "linestyles": style, "linewidths": 1.4}
    ax.add_collection(PolyCollection(found, **lines))
    return _frame(ax, box)


def plot_regions(grid: Grid, ax: Axes, *, kept: Mask | None = None, palette: Sequence[str] = PALETTE) -> Axes:
    """Fill the classes of a grid, whose walls may be curves; points that a mask keeps get a deeper colour.

    Args:
        grid: Class of each point.
        ax: Axes to draw on.
        kept: Mask (r, r) of kept points; None draws all points alike.
        palette: Colours of the classes; they repeat after the last.
    """
    from matplotlib.colors import to_rgb

    labels = grid.values.astype(np.int64)
    count = int(labels.max()) + 1
    colours = [palette[k % len(palette)] for k in range(count)]
    table = np.array([[to_rgb(lighten(colour, share)) for colour in colours] for share in (PALE, DEEP)])
    depth = np.zeros_like(labels) if kept is None else kept.astype(np.int64)
    ax.imshow(table[depth, labels], origin="lower", extent=_extent(grid), interpolation="nearest", zorder=0)
    return _frame(ax, _box(grid))


def name_regions(grid: Grid, ax: Axes, *, names: Mapping[int, str]) -> Axes:
    """Write a name in the middle of each region of a grid that is large enough."""
    for label, name in names.items():
        inside = np.argwhere(grid.values == label)
        if len(inside) > NAMED_SHARE * grid.values.size:
            row, column = inside[np.square(inside - inside.mean(0)).sum(1).argmin()]
            text: Any = {"color": MUTED, "fontsize": 9, "ha": "center", "va": "center"}
            ax.text(grid.xs[column], grid.ys[row], name, zorder=1, clip_on=True, **text)
    return ax


def plot_contours(grid: Grid, ax: Axes, *, style: str = "-", colour: str = INK) -> Axes:
    """Draw the walls between the classes of a grid, in a line style and colour of matplotlib."""
    lines: Any = {"levels": [0.5], "colors": colour, "linestyles": style, "linewidths": 1.4, "zorder": 1}
    for label in np.unique(grid.values)[1:]:
        ax.contour(grid.xs, grid.ys, (grid.values == label).astype(np.float64), **lines)
    return _frame(ax, _box(grid))


def plot_entropy(grid: Grid, ax: Axes, *, classes: int) -> Axes:
    """Shade the entropy of soft labels over the plane, from certain (dark) to undecided (bright).

    Args:
        grid: Entropy of each point in nats.
        ax: Axes to draw on; a scale is drawn below them.
        classes: Number of classes; the brightest colour is the entropy log(classes) of a uniform label.
    """
    shades: Any = {
        "cmap": "cividis",
        "vmin": 0.0,
        "vmax": float(np.log(classes)),
        "interpolation": "bilinear",
    }
    image = ax.imshow(grid.values, origin="lower", extent=_extent(grid), zorder=0, **shades)
    scale = ax.figure.colorbar(
        image, ax=ax, location="bottom", fraction=0.05, pad=0.02, label="entropy (nats)"
    )
    scale.outline.set_visible(False)
    return _frame(ax, _box(grid))


def plot_points(points: Floats, labels: Labels, ax: Axes, *, wrong: Mask | None = None) -> Axes:
    """Draw features in the colours of their true classes; misclassified ones get a dark ring.

    Args:
        points: Features (n, 2).
        labels: True classes (n,).
        ax: Axes to draw on.
        wrong: Mask (n,) of misclassified features.
    """
    marked = np.zeros(len(labels), dtype=bool) if wrong is None else wrong
    fine, ringed = {"s": 11, "alpha": 0.75, "linewidths": 0}, {"s": 17, "edgecolors": INK, "linewidths": 0.9}
    for mask, look, order in ((~marked, fine, 2), (marked, ringed, 3)):
        colours, style = [class_colour(label) for label in labels[mask]], cast(Any, look)
        # Beyond some thousand points one bitmap is smaller than a path for each.
        ax.scatter(
            points[mask, 0],
            points[mask, 1],
            c=colours,
            rasterized=len(points) > MOST_PATHS,
            zorder=order,
            **style,
        )
    return ax


def plot_sites(diagram: Diagram, ax: Axes, *, names: Sequence[str]) -> Axes:
    """Draw the sites, each with the name of its class: on the site if all names are short, else beside it.

    Args:
        diagram: Diagram in two dimensions.
        ax: Axes to draw on.
        names: Names of the classes.
    """
    groups = range(diagram.num_sites) if diagram.groups is None else diagram.groups.tolist()
    short, middle = max(map(len, names)) <= SHORT, diagram.sites.mean(0)
    for label, place in zip(groups, diagram.sites, strict=True):
        x, y = place.tolist()
        shape = "circle,pad=0.18" if short else "round,pad=0.25"
        text: Any = {"color": "white", "fontsize": 8, "fontweight": "bold", "ha": "center", "va": "center"}
        text["bbox"] = {"boxstyle": shape, "facecolor": class_colour(label), "edgecolor": "white"}
        if short:
            ax.text(x, y, names[label], zorder=5, clip_on=True, **text)
        else:
            ax.scatter([x], [y], s=60, marker="D", c=class_colour(label), edgecolors="white", zorder=5)
            away = torch.nn.functional.normalize(place - middle, dim=0).tolist()
            text["ha"], text["va"] = (
                _align(float(step), *sides) for step, sides in zip(away, SIDES, strict=True)
            )
            ax.annotate(
                names[label], (x, y), (9 * away[0], 9 * away[1]), textcoords="offset points", zorder=6, **text
            )
    return ax


def plot_moves(before: Floats, after: Floats, labels: Labels, ax: Axes) -> Axes:
    """Draw an arrow from the old to the new place of each feature, in the colour of its true class.

    Args:
        before: Old places (n, 2).
        after: New places (n, 2).
        labels: True classes (n,).
        ax: Axes to draw on.
    """
    colours = [class_colour(label) for label in labels]
    step = after - before
    scaling: Any = {"angles": "xy", "scale_units": "xy", "scale": 1.0}
    heads: Any = {"width": 0.0045, "headwidth": 4.5, "headlength": 5.5, "headaxislength": 5.0}
    ax.scatter(before[:, 0], before[:, 1], s=9, c="white", edgecolors=colours, linewidths=0.8, zorder=2)
    ax.quiver(*before.T, *step.T, color=colours, zorder=3, **scaling, **heads)
    return ax


def _align(step: float, before: str, after: str) -> str:
    """Return the alignment of a text that is moved by a step, so that it does not cover its old place."""
    return after if step > 0.5 else before if step < -0.5 else "center"


def _extent(grid: Grid) -> Box:
    return float(grid.xs[0]), float(grid.xs[-1]), float(grid.ys[0]), float(grid.ys[-1])


def _box(grid: Grid) -> Box:
    xmin, xmax, ymin, ymax = _extent(grid)
    return xmin, ymin, xmax, ymax


def _frame(ax: Axes, box: Box) -> Axes:
    """Show the box, in true proportions and without ticks: the axes of learned features have no meaning."""
    ax.set(xlim=(box[0], box[2]), ylim=(box[1], box[3]), xticks=[], yticks=[], aspect="equal")
    ax.spines[:].set_color(FAINT)
    return ax
