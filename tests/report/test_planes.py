"""Pictures of feature planes."""

import sys
from collections.abc import Callable

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Polygon
from matplotlib.quiver import Quiver

from ttvd.geometry import Diagram, cells, grid_labels
from ttvd.report import planes
from ttvd.report.planes import DEEP, PALE, Box, Grid
from ttvd.report.style import INK, class_colour, lighten

BOX: Box = (-3.0, -3.0, 3.0, 3.0)
SITES = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.1, 0.0]])


@pytest.fixture
def ax() -> Axes:
    return Figure().subplots()


def power_diagram() -> Diagram:
    """Its last site has no cell."""
    return Diagram(SITES, torch.tensor([0.0, 0.0, 0.0, -9.0]))


def halves() -> Grid:
    return Grid(*grid_labels(Diagram(torch.tensor([[-1.0, 0.0], [1.0, 0.0]])), BOX, 8))


def test_every_cell_that_is_not_empty_is_a_patch(ax: Axes) -> None:
    diagram = power_diagram()
    expected = [polygon for polygon in cells(diagram, BOX) if len(polygon)]
    planes.plot_cells(diagram, ax, box=BOX)
    assert len(ax.patches) == len(expected) == 3
    for patch, polygon in zip(ax.patches, expected, strict=True):
        assert isinstance(patch, Polygon)
        assert np.allclose(np.asarray(patch.get_xy())[:-1], polygon)
    assert (*ax.get_xlim(), *ax.get_ylim()) == (-3, 3, -3, 3)


def test_cells_of_a_class_share_its_colour(ax: Axes) -> None:
    planes.plot_cells(Diagram(SITES, groups=torch.tensor([0, 1, 1, 0])), ax, box=BOX)
    fills = [to_hex(patch.get_facecolor()) for patch in ax.patches]
    assert fills == [lighten(class_colour(label), PALE) for label in (0, 1, 1, 0)]


def test_walls_are_drawn_without_the_sides_of_the_box(ax: Axes) -> None:
    planes.plot_boundaries(power_diagram(), ax, box=BOX, style="--")
    (walls,) = ax.collections
    corners = np.concatenate([path.vertices for path in walls.get_paths()])
    assert len(walls.get_paths()) == 3
    assert np.abs(corners).max() > 3
    inside = corners[(np.abs(corners) < 3).all(axis=1)]
    power = ((inside[:, None] - SITES[:3].numpy()) ** 2).sum(-1)
    assert np.allclose(np.diff(np.sort(power, axis=1)[:, :2]), 0, atol=1e-5)


def test_the_kept_region_is_the_agreement_mask(ax: Axes) -> None:
    grid = halves()
    other, _, _ = grid_labels(Diagram(torch.tensor([[-1.0, 0.5], [1.0, -0.5]])), BOX, 8)
    kept = grid.values == other
    planes.plot_regions(grid, ax, kept=kept)
    drawn = np.asarray(ax.images[0].get_array())
    deep = np.array([to_rgb(lighten(class_colour(label), DEEP)) for label in (0, 1)])[grid.values]
    assert 0 < kept.sum() < kept.size
    assert np.array_equal((drawn == deep).all(axis=-1), kept)


def test_contours_lie_between_the_classes(ax: Axes) -> None:
    planes.plot_contours(halves(), ax)
    (contour,) = ax.collections
    line = np.concatenate([path.vertices for path in contour.get_paths()])
    assert np.allclose(line[:, 0], 0)


def test_entropy_is_scaled_to_the_uniform_label(ax: Axes) -> None:
    values = np.linspace(0, np.log(3), 64).reshape(8, 8)
    planes.plot_entropy(Grid(values, *halves()[1:]), ax, classes=3)
    assert np.allclose(ax.images[0].get_clim(), (0.0, np.log(3)))
    assert np.array_equal(np.asarray(ax.images[0].get_array()), values)
    assert isinstance(ax.figure, Figure)
    assert len(ax.figure.axes) == 2


def test_wrong_points_get_a_ring(ax: Axes) -> None:
    points = np.arange(8.0).reshape(4, 2)
    wrong = np.array([False, True, False, True])
    planes.plot_points(points, np.array([0, 0, 1, 2]), ax, wrong=wrong)
    fine, ringed = ax.collections
    assert isinstance(fine, PathCollection)
    assert isinstance(ringed, PathCollection)
    assert np.array_equal(np.asarray(fine.get_offsets()), points[~wrong])
    assert np.array_equal(np.asarray(ringed.get_offsets()), points[wrong])
    assert [to_hex(colour) for colour in np.asarray(ringed.get_facecolor())] == [
        class_colour(0),
        class_colour(2),
    ]
    assert to_hex(np.asarray(ringed.get_edgecolor())[0]) == INK
    assert np.asarray(fine.get_linewidth())[0] == 0


def test_many_points_become_a_bitmap(ax: Axes) -> None:
    points = np.zeros((planes.PATHS + 1, 2))
    planes.plot_points(points, np.zeros(len(points), dtype=np.int64), ax)
    assert all(collection.get_rasterized() for collection in ax.collections)


def test_sites_are_named_by_class(ax: Axes) -> None:
    planes.plot_sites(Diagram(SITES, groups=torch.tensor([0, 1, 1, 0])), ax, names=["cat", "dog"])
    assert [text.get_text() for text in ax.texts] == ["cat", "dog", "dog", "cat"]
    assert np.allclose([text.get_position() for text in ax.texts], SITES)


def test_arrows_lead_from_before_to_after(ax: Axes) -> None:
    before, after = np.array([[0.0, 0.0], [1.0, 1.0]]), np.array([[1.0, 0.0], [1.0, 3.0]])
    planes.plot_moves(before, after, np.array([0, 1]), ax)
    (arrows,) = [artist for artist in ax.collections if isinstance(artist, Quiver)]
    assert np.array_equal(arrows.XY, before)
    assert np.array_equal(np.column_stack([arrows.U, arrows.V]), after - before)
    assert (arrows.scale, arrows.scale_units, arrows.angles) == (1.0, "xy", "xy")


@pytest.mark.parametrize(
    "draw",
    [
        lambda points, labels, ax: planes.plot_points(points, labels, ax, wrong=labels > 0),
        lambda points, labels, ax: planes.plot_moves(points, points + 1, labels, ax),
        lambda points, labels, ax: planes.plot_regions(
            Grid(labels.reshape(2, 2), points[:2, 0], points[:2, 1]), ax
        ),
    ],
)
def test_drawing_changes_neither_data_nor_settings(draw: Callable[..., Axes], ax: Axes) -> None:
    points, labels = np.arange(8.0).reshape(4, 2), np.array([0, 1, 2, 0])
    settings, had_pyplot = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    assert draw(points, labels, ax) is ax
    assert points.tolist() == np.arange(8.0).reshape(4, 2).tolist()
    assert labels.tolist() == [0, 1, 2, 0]
    assert dict(matplotlib.rcParams) == settings
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot
