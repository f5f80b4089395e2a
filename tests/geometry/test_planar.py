"""Exact 2-D cells and slices against scipy's diagrams, shapely's clipping and the argmin itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import shapely
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import Voronoi
from scipy.spatial.distance import cdist
from torch import Tensor

from ttvd.geometry import Diagram, assign, point_influence, power_distances
from ttvd.geometry.planar import cells, grid_labels, slice_plane

Points = npt.NDArray[np.float64]
BOUNDED = settings(deadline=None, derandomize=True, max_examples=25)
SEEDS = st.integers(0, 2**16)
BOX = (-2.0, -1.5, 2.5, 2.0)
AREA = 4.5 * 3.5


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(seed: int, size: int, weighted: bool) -> Diagram:
    return Diagram(draw(seed, size, 2), draw(seed + 1, size) if weighted else None)


def signed_area(polygon: Points) -> float:
    x, y = polygon.T
    return float(np.sum(x * np.roll(y, -1) - y * np.roll(x, -1)) / 2)


def depth(polygon: Points, points: Points) -> Points:
    """Signed distance of each point to the nearest side of a counter-clockwise convex polygon."""
    sides = np.roll(polygon, -1, axis=0) - polygon
    length = np.hypot(*sides.T)
    corners, sides = polygon[length > 1e-12], sides[length > 1e-12] / length[length > 1e-12, None]
    offsets = points[:, None] - corners
    nearest: Points = (sides[:, 0] * offsets[..., 1] - sides[:, 1] * offsets[..., 0]).min(1)
    return nearest


def check_cells(diagram: Diagram) -> list[Points]:
    """Polygons are convex, counter-clockwise, fill the box, and hold what the argmin gives them."""
    polygons = cells(diagram, BOX)
    assert len(polygons) == diagram.num_sites
    low, high = np.array(BOX[:2]), np.array(BOX[2:])
    points = low + (high - low) * np.random.default_rng(0).random((500, 2))
    weights = 0 if diagram.weights is None else diagram.weights.numpy()
    winners = (cdist(points, diagram.sites.numpy(), "sqeuclidean") - weights).argmin(1)
    for site, polygon in enumerate(polygons):
        assert polygon.dtype == np.float64
        if len(polygon) == 0:
            assert polygon.shape == (0, 2)
            assert site not in winners
            continue
        assert polygon.shape[1] == 2
        assert len(polygon) >= 3
        assert signed_area(polygon) > 0
        assert depth(polygon, polygon).min() > -1e-8
        assert bool(((polygon >= low - 1e-9) & (polygon <= high + 1e-9)).all())
        inside = depth(polygon, points)
        assert bool((inside[winners == site] > -1e-8).all())
        assert bool((inside[winners != site] < 1e-8).all())
    total = sum(signed_area(polygon) for polygon in polygons if len(polygon))
    assert total == pytest.approx(AREA)
    return polygons


@BOUNDED
@given(seed=SEEDS, size=st.integers(1, 12), weighted=st.booleans())
def test_cells_are_the_argmin(
    naive_cell: Callable[..., shapely.Polygon], seed: int, size: int, weighted: bool
) -> None:
    plain = make(seed, size, weighted)
    diagram = Diagram(plain.sites, plain.weights, torch.arange(size) // 2)
    for site, polygon in enumerate(check_cells(diagram)):
        truth = naive_cell(plain, site, BOX)
        assert (signed_area(polygon) if len(polygon) else 0) == pytest.approx(truth.area, abs=1e-9)


@pytest.mark.parametrize("weighted", [False, True])
def test_two_hundred_sites(weighted: bool) -> None:
    diagram = make(1, 200, weighted)
    diagram = Diagram(diagram.sites.clamp(-1, 1) + diagram.sites / 10, diagram.weights)
    polygons = check_cells(diagram)
    assert any(len(polygon) == 0 for polygon in polygons) == weighted


def test_cell_corners_are_scipys_voronoi_vertices() -> None:
    sites = draw(2, 40, 2)
    oracle = Voronoi(sites.numpy())
    inside = [bool((v > np.array(BOX[:2])).all() and (v < np.array(BOX[2:])).all()) for v in oracle.vertices]
    assert sum(inside) > 20
    whole = 0
    for site, polygon in enumerate(cells(Diagram(sites), BOX)):
        region = oracle.regions[oracle.point_region[site]]
        for vertex in (v for v in region if v >= 0 and inside[v]):
            assert np.hypot(*(polygon - oracle.vertices[vertex]).T).min() < 1e-9
        if all(v >= 0 and inside[v] for v in region):
            whole += 1
            assert signed_area(polygon) == pytest.approx(shapely.Polygon(oracle.vertices[region]).area)
    assert whole > 5


def test_one_two_collinear_and_lattice_sites() -> None:
    (whole,) = check_cells(Diagram(torch.tensor([[9.0, 9.0]])))
    assert signed_area(whole) == pytest.approx(AREA)
    halves = check_cells(Diagram(torch.tensor([[-1.0, 0.0], [2.0, 0.0]])))
    assert [signed_area(p) for p in halves] == pytest.approx([2.5 * 3.5, 2.0 * 3.5])
    strips = check_cells(Diagram(torch.tensor([[0.0, -1.0], [0.0, 0.0], [0.0, 1.0], [0.0, 2.0]])))
    assert [signed_area(p) for p in strips] == pytest.approx([4.5, 4.5, 4.5, 2.25])
    lattice = torch.cartesian_prod(
        torch.arange(-1.0, 3), torch.arange(-1.0, 2)
    )  # four cells meet at a corner
    assert {round(signed_area(p), 9) for p in check_cells(Diagram(lattice))} == {1.0, 1.5, 2.25}


def test_empty_and_unbounded_cells() -> None:
    far = check_cells(Diagram(torch.tensor([[0.0, 0.0], [50.0, 0.0]])))
    assert [len(p) for p in far] == [4, 0]
    swallowed = check_cells(Diagram(torch.tensor([[0.0, 0], [1, 0], [0, 1]]), torch.tensor([9.0, 0.0, 8.5])))
    assert [len(p) > 0 for p in swallowed] == [True, False, True]
    twins = check_cells(Diagram(torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([0.0, 1.0])))
    assert [len(p) > 0 for p in twins] == [False, True]
    for polygon in check_cells(Diagram(torch.tensor([[0.0, 0.5], [0.5, 0.0], [-0.5, -0.5]]))):
        assert np.isclose(polygon, BOX[:2]).any() or np.isclose(polygon, BOX[2:]).any()


@BOUNDED
@given(seed=SEEDS, size=st.integers(1, 8), dim=st.integers(2, 6), weighted=st.booleans())
def test_slice_equals_the_diagram_on_its_plane(seed: int, size: int, dim: int, weighted: bool) -> None:
    groups = torch.arange(size) // 2 if seed % 2 else None
    diagram = Diagram(draw(seed, size, dim), draw(seed + 1, size) if weighted else None, groups)
    origin, u, v = draw(seed + 2, 3, dim)
    flat = slice_plane(diagram, origin, u, v)
    first = u / u.norm()
    second = v - (v @ first) * first
    y = 2 * draw(seed + 3, 50, 2)
    z = origin + y @ torch.stack([first, second / second.norm()])
    assert (flat.dim, flat.num_sites, flat.num_classes) == (2, size, diagram.num_classes)
    assert (flat.groups is None) == (groups is None)
    y = y.to(flat.sites.dtype)
    torch.testing.assert_close(power_distances(y, flat), power_distances(z, diagram), rtol=1e-6, atol=1e-9)
    one, two = Diagram(flat.sites, flat.weights), Diagram(diagram.sites, diagram.weights)
    assert torch.equal(assign(y, one), assign(z, two))
    if diagram.weights is not None:
        found = point_influence(y, flat, -0.8, shift=9.0)
        torch.testing.assert_close(found, point_influence(z, diagram, -0.8, shift=9.0), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("gamma", [-0.8, 0.0, 1.0])
@pytest.mark.parametrize("shift", [None, 5.0])
def test_grid_labels_equal_assign(gamma: float, shift: float | None) -> None:
    clusters = Diagram.from_means(draw(6, 4, 3, 2))
    heavy = Diagram(clusters.sites, draw(7, 12), clusters.groups)
    for diagram in (clusters, heavy, make(8, 5, weighted=True)):
        labels, xs, ys = grid_labels(diagram, BOX, 21, gamma, shift)
        assert labels.shape == (21, 21)
        assert np.issubdtype(labels.dtype, np.integer)
        for axis, low, high in ((xs, BOX[0], BOX[2]), (ys, BOX[1], BOX[3])):
            assert axis.shape == (21,)
            assert bool((np.diff(axis) > 0).all())
            assert low <= axis[0] < low + (high - low) / 20
            assert high - (high - low) / 20 < axis[-1] <= high
        points = torch.tensor([[x, y] for y in ys for x in xs], dtype=torch.float64)
        np.testing.assert_array_equal(labels.ravel(), assign(points, diagram, gamma, shift).numpy())


SOLID = Diagram(torch.eye(3))
FLAT = Diagram(torch.eye(2))
E1, E2 = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])
WRONG: dict[str, Callable[[], object]] = {
    "cells in space": lambda: cells(SOLID, BOX),
    "grid in space": lambda: grid_labels(SOLID, BOX, 5),
    "box inside out": lambda: cells(FLAT, (1.0, 0.0, 0.0, 1.0)),
    "flat box": lambda: cells(FLAT, (0.0, 0.0, 1.0, 0.0)),
    "grid without points": lambda: grid_labels(FLAT, BOX, 0),
    "parallel directions": lambda: slice_plane(SOLID, E1, E2, -2 * E2),
    "no direction": lambda: slice_plane(SOLID, E1, 0 * E1, E2),
    "directions of another space": lambda: slice_plane(SOLID, E1, E1[:2], E2[:2]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused(case: str) -> None:
    words = "(?i)2-D|dimension|box|resolution|parallel|independent|span|zero|shape|expected"
    with pytest.raises((ValueError, TypeError), match=words):
        WRONG[case]()
