"""Distances and margins against double loops, finite differences and the laws of Euclidean space."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import shapely
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ttvd.geometry import Diagram, assign, distances, margin, power_distances, squared_distances

Oracle = Callable[..., Tensor]
BOUNDED = settings(deadline=None, derandomize=True, max_examples=30)
SEEDS = st.integers(0, 2**16)
SMALL = st.integers(1, 6)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@BOUNDED
@given(seed=SEEDS, batch=SMALL, size=SMALL, dim=SMALL)
def test_distances_equal_double_loops(
    naive_squared: Oracle, seed: int, batch: int, size: int, dim: int
) -> None:
    z, sites, weights = draw(seed, batch, dim), draw(seed + 1, size, dim), draw(seed + 2, size)
    squared = naive_squared(z, sites)
    torch.testing.assert_close(squared_distances(z, sites), squared)
    torch.testing.assert_close(power_distances(z, Diagram(sites, weights)), squared - weights)
    torch.testing.assert_close(power_distances(z, Diagram(sites)), squared)
    torch.testing.assert_close(distances(z, Diagram(sites)), squared.sqrt())
    torch.testing.assert_close(distances(z, Diagram(sites, weights)), squared.sqrt())


@pytest.mark.parametrize("function", [power_distances, distances, margin, assign])
def test_invariances(function: Callable[..., Tensor]) -> None:
    z, sites, weights = draw(5, 50, 4), draw(6, 8, 4), draw(7, 8)
    rotation = torch.linalg.qr(draw(8, 4, 4))[0]
    order = torch.randperm(8, generator=torch.Generator().manual_seed(9))
    base = function(z, Diagram(sites, weights))
    torch.testing.assert_close(function(z + 3, Diagram(sites + 3, weights)), base)
    torch.testing.assert_close(function(z @ rotation, Diagram(sites @ rotation, weights)), base)
    scaled = function(2.5 * z, Diagram(2.5 * sites, 2.5**2 * weights))
    factor = {power_distances: 2.5**2, assign: 1}.get(function, 2.5)
    torch.testing.assert_close(scaled, (factor * base).to(base.dtype))
    permuted = function(z, Diagram(sites[order], weights[order]))
    if function is assign:
        permuted = order[permuted]
    torch.testing.assert_close(permuted, base[:, order] if base.ndim == 2 else base)
    raised = function(z, Diagram(sites, weights + 7))
    torch.testing.assert_close(raised, base - 7 if function is power_distances else base)


@pytest.mark.parametrize("function", [power_distances, distances, margin])
def test_gradients_equal_finite_differences(function: Callable[..., Tensor]) -> None:
    inputs = [x.requires_grad_() for x in (draw(10, 4, 3), draw(11, 5, 3), draw(12, 5))]
    assert torch.autograd.gradcheck(lambda z, s, w: function(z, Diagram(s, w)), inputs)
    assert torch.autograd.gradcheck(squared_distances, inputs[:2])


def test_site_lies_in_its_own_voronoi_cell(naive_margin: Oracle) -> None:
    sites = draw(13, 60, 5, dtype=torch.float32)
    assert assign(sites, Diagram(sites)).tolist() == list(range(60))
    truth = naive_margin(sites, sites, torch.zeros(60), list(range(60)))
    torch.testing.assert_close(margin(sites, Diagram(sites)).double(), truth, rtol=1e-4, atol=1e-4)


@BOUNDED
@given(seed=SEEDS, batch=SMALL, size=st.integers(2, 6), dim=SMALL)
def test_margin_equals_double_loop(naive_margin: Oracle, seed: int, batch: int, size: int, dim: int) -> None:
    z, sites, weights = draw(seed, batch, dim), draw(seed + 1, size, dim), draw(seed + 2, size)
    diagram = Diagram(sites, weights)
    labels = torch.randint(size, (batch,), generator=torch.Generator().manual_seed(seed))
    truth = naive_margin(z, sites, weights, labels.tolist())
    torch.testing.assert_close(margin(z, diagram, labels), truth, rtol=1e-6, atol=1e-9)
    own = margin(z, diagram)
    truth = naive_margin(z, sites, weights, assign(z, diagram).tolist())
    torch.testing.assert_close(own, truth, rtol=1e-6, atol=1e-9)
    assert bool((own >= 0).all())


@BOUNDED
@given(seed=SEEDS, dim=SMALL, step=st.floats(-3, 3) | st.just(0.0))
def test_margin_is_the_signed_distance_to_the_bisector(seed: int, dim: int, step: float) -> None:
    sites, weights = draw(seed, 2, dim), draw(seed + 1, 2)
    across = sites[1] - sites[0]
    gap = float(across.norm())
    foot = sites[0] + across * (0.5 + (weights[0] - weights[1]) / (2 * gap**2))
    z = (foot + step * across / gap)[None]
    for label, sign in ((0, -1), (1, 1)):
        found = float(margin(z, Diagram(sites, weights), torch.tensor([label])))
        assert found == pytest.approx(sign * step, abs=1e-11 * (1 + 1 / gap**3))


@pytest.mark.parametrize("weighted", [False, True])
def test_margin_is_the_distance_to_the_boundary_of_the_cell(
    naive_cell: Callable[..., shapely.Polygon], weighted: bool
) -> None:
    diagram, z = Diagram(draw(14, 9, 2), draw(15, 9) if weighted else None), draw(16, 200, 2) / 2
    box = (-5.0, -4.0, 4.0, 5.0)
    frame = shapely.box(*box).exterior
    found, labels, checked = margin(z, diagram), assign(z, diagram).tolist(), 0
    for point, value, label in zip(z.tolist(), found.tolist(), labels, strict=True):
        place = shapely.Point(point)
        truth = naive_cell(diagram, label, box).exterior.distance(place)
        if truth < place.distance(frame) - 1e-9:  # the box is no part of the diagram
            assert value == pytest.approx(truth, abs=1e-9)
            checked += 1
    assert checked > 100


def test_margin_of_one_site_and_beside_a_duplicate() -> None:
    assert margin(torch.zeros(3, 2), Diagram(torch.ones(1, 2))).tolist() == [math.inf] * 3
    sites, weights = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 0.0]]), torch.tensor([2.0, 0.0, 1.0])
    z = torch.tensor([[1.0, 3.0], [5.0, 1.0]])
    without = margin(z, Diagram(sites[:2], weights[:2]))
    torch.testing.assert_close(margin(z, Diagram(sites, weights)), without)
    buried = margin(z, Diagram(sites, weights), torch.tensor([2, 2]))
    assert buried.tolist() == [-math.inf] * 2


WRONG: dict[str, Callable[[], object]] = {
    "squared, features": lambda: squared_distances(torch.zeros(2, 3), torch.eye(2)),
    "power, rank": lambda: power_distances(torch.zeros(2), Diagram(torch.eye(2))),
    "distances, features": lambda: distances(torch.zeros(2, 3), Diagram(torch.eye(2))),
    "margin, features": lambda: margin(torch.zeros(2, 3), Diagram(torch.eye(2))),
    "margin, labels": lambda: margin(torch.zeros(2, 2), Diagram(torch.eye(2)), torch.zeros(3).long()),
    "margin, clusters": lambda: margin(
        torch.zeros(1, 2), Diagram(torch.eye(2), groups=torch.zeros(2).long())
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused(case: str) -> None:
    with pytest.raises((ValueError, TypeError), match=r"(?i)shape|expected|feature|label|group|cluster"):
        WRONG[case]()
