"""What a computer adds to the definitions: precision, the floor, memory, and waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ttvd.geometry as geo
from ttvd.geometry import (
    Diagram,
    assign,
    distances,
    floored_fraction,
    margin,
    point_influence,
    squared_distances,
)

Oracle = Callable[..., Tensor]
Watcher = Callable[[Callable[[], object]], tuple[int, set[str]]]
# Operations that make the host wait for the device, by their names in ATen.
WAITING = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "_unique2", "unique_dim"}


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
def test_computed_in_float32_or_better(
    naive_squared: Oracle, naive_margin: Oracle, dtype: torch.dtype, autocast: bool
) -> None:
    z, sites = draw(0, 9, 32).to(dtype), draw(1, 7, 32).to(dtype)
    diagram = Diagram(sites)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = squared_distances(z, sites), distances(z, diagram), margin(z, diagram)
    squared = naive_squared(z, sites)
    borders = naive_margin(z, sites, torch.zeros(7), squared.argmin(-1).tolist())
    for value, truth in zip(found, (squared, squared.sqrt(), borders), strict=True):
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_autocast_does_not_touch_the_diagram(dtype: torch.dtype) -> None:
    weight = draw(0, 6, 32).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        voronoi, power = Diagram(weight), Diagram.from_linear(weight.float(), views=2)
        back, bias = power.to_linear()
    assert torch.equal(voronoi.sites, weight)
    torch.testing.assert_close(back, weight.float())
    torch.testing.assert_close(bias, torch.zeros(6), rtol=0, atol=1e-4)


def test_no_cancellation_far_from_the_origin(naive_squared: Oracle) -> None:
    z, sites = (draw(2, 20, 16) + 1e4).float(), (draw(3, 10, 16) + 1e4).float()
    truth = naive_squared(z, sites)
    torch.testing.assert_close(squared_distances(z, sites).double(), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("away", [0.0, 1e-4, 1e-2, 0.1, 1.0])
def test_error_of_a_short_distance_is_the_rounding_of_a_long_one(naive_squared: Oracle, away: float) -> None:
    sites = draw(22, 12, 256, dtype=torch.float32)
    z = sites + away * draw(23, 12, 256, dtype=torch.float32) / 16
    error = (squared_distances(z, sites).double() - naive_squared(z, sites)).abs()
    # One product after centring loses a few units in the last place of |z|^2 + |site|^2, here about 512.
    assert error.max() < 16 * torch.finfo(torch.float32).eps * 512


def test_empty_batch() -> None:
    clusters, z = Diagram.from_means(draw(24, 3, 2, 4)), torch.zeros(2, 0, 4, dtype=torch.float64)
    assert geo.view_scores(z, clusters, -0.8).shape == point_influence(z[0], clusters, 0.0).shape == (0, 3)
    assert assign(z, clusters).shape == margin(z[0], Diagram(clusters.sites)).shape == (0,)


def test_floor_on_a_site_has_no_slope_and_nothing_is_negative() -> None:
    sites = draw(4, 40, 64, dtype=torch.float32)
    assert bool((squared_distances(sites, sites) >= 0).all())
    corners = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0]], requires_grad=True)
    found = distances(corners, Diagram(corners.detach())).diagonal()
    # Centred corners have mean squared norm 2, so the floor of d^2 is 2 eps.
    floor = math.sqrt(2 * torch.finfo(torch.float32).eps)
    assert found.tolist() == pytest.approx([floor] * 4)
    (slope,) = torch.autograd.grad(found.sum(), corners)
    assert slope.abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_computed_in_float32(naive_influence: Oracle, dtype: torch.dtype) -> None:
    z, groups = draw(18, 4, 6, 32).to(dtype), torch.arange(3).repeat_interleave(4)
    diagram = Diagram(draw(19, 12, 32).to(dtype), draw(20, 12).to(dtype), groups)
    with torch.autocast("cpu", torch.bfloat16):
        found = geo.view_influence(z, diagram, -0.8), geo.view_scores(z, diagram, -0.8)
        soft = geo.soft_labels(found[1])
    assert soft.dtype == torch.float32
    for value, centred in zip(found, (False, True), strict=True):
        assert value.dtype == torch.float32
        truth = naive_influence(z, diagram.to(dtype=torch.float32), -0.8, None, centred)
        torch.testing.assert_close(value.double(), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gamma", [-2.0, -0.8, 0.0, 0.5])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_a_site_everything_is_finite(gamma: float, weighted: bool, dtype: torch.dtype) -> None:
    corners = torch.tensor([[0, 0], [2, 0], [0, 2], [2, 2]], dtype=dtype)
    for sites in (corners, draw(21, 20, 64, dtype=dtype), corners[:1]):
        z = sites.clone().requires_grad_()
        diagram = Diagram(sites, torch.ones(len(sites), dtype=dtype) if weighted else None)
        found = point_influence(z, diagram, gamma)
        (slope,) = torch.autograd.grad(found.diagonal().sum(), z)
        assert bool(found.isfinite().all())
        assert bool(slope.isfinite().all())
        assert found.argmax(-1).tolist() == list(range(len(sites)))
        if len(sites) <= 4:
            assert slope.abs().max() == 0
            assert float(floored_fraction(z, diagram, None)) == pytest.approx(1 / len(sites))


@pytest.mark.parametrize("gamma", [-2.0, -0.8, 0.0, 0.5, 1.0])
def test_negative_power_distance_with_literal_shift_zero(naive_influence: Oracle, gamma: float) -> None:
    sites = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0], [9.0, 9.0]])
    diagram = Diagram(sites, torch.tensor([30.0, 30.0, 30.0, -1.0]), torch.tensor([0, 0, 1, 1]))
    z = torch.tensor([[1.0, 1.0], [100.0, 0.0], [0.0, 8.0]], requires_grad=True)
    # Power distances below zero: row 0 meets sites 0, 1, 2; row 1 none; row 2 only site 2.
    assert float(floored_fraction(z, diagram, 0.0)) == pytest.approx(4 / 12)
    assert float(floored_fraction(z, diagram, None)) == 0
    found = point_influence(z, diagram, gamma, 0.0)
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), naive_influence(z, diagram, gamma, 0.0), rtol=1e-5, atol=1e-5)
    (slope,) = torch.autograd.grad(found[0, 0], z)
    assert slope.abs().max() == 0


def test_inputs_stay_as_they_were_and_nothing_waits_for_the_device(watched: Watcher) -> None:
    z, sites = draw(14, 3, 4, 5, dtype=torch.float32), draw(15, 18, 5, dtype=torch.float32)
    weights, labels = draw(16, 18, dtype=torch.float32), torch.tensor([0, 5, 2, 2])
    groups, plain = torch.arange(6).repeat_interleave(3), Diagram(sites, weights)
    clusters = [Diagram(sites, weights, groups), Diagram(sites, None, groups)]
    scattered = Diagram(sites, weights, groups.roll(1))

    def use_everything() -> None:
        for diagram in clusters:
            for gamma in (-0.8, 0.0, 1.0):
                geo.view_influence(z, diagram, gamma)
                geo.view_scores(z, diagram, gamma, 0.5)
                geo.point_influence(z[0], diagram, gamma)
                geo.soft_labels(geo.point_scores(z[0], diagram, gamma, 0.5))
            assert geo.agreement(assign(z, diagram), assign(z[0], diagram)).shape == (4,)
            geo.kept_fraction(geo.floored_fraction(z, diagram, 0.0)[None] > 0)
        geo.point_scores(z[0], scattered, -0.8)
        for function in (margin, distances, geo.power_distances, assign):
            function(z[0], plain)
        margin(z[0], plain, labels)

    tensors = (z, sites, weights, groups, labels)
    before = [x.clone() for x in tensors]
    _, names = watched(use_everything)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))
    assert not names & WAITING


def test_memory_stays_far_below_batch_times_sites_times_features(watched: Watcher) -> None:
    batch, size, dim = 64, 4_000, 512
    sites = draw(17, size, dim, dtype=torch.float32)
    z = sites[:batch].clone().requires_grad_()

    def use_many_classes() -> None:
        diagram = Diagram(sites)
        for gamma, weights in ((-0.8, None), (0.5, sites[:, 0])):
            total = geo.point_scores(z, Diagram(sites, weights), gamma).sum()
            (slope,) = torch.autograd.grad(total, z)
            assert bool(slope.isfinite().all())
        assert assign(z, diagram).tolist() == list(range(batch))
        margin(z, diagram)

    largest, _ = watched(use_many_classes)
    assert largest <= 4 * (4 * size * dim), "b x s x d is 64 times the sites"


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("exponent", range(-36, 37, 4))
def test_cells_at_extreme_coordinates_are_right_or_refused(
    naive_squared: Oracle, exponent: int, weighted: bool
) -> None:
    """In float32, squared distances underflow or overflow far inside the range of the coordinates."""
    scale = 10.0**exponent
    sites, z = (scale * draw(30, 6, 2)).float(), (3 * scale * draw(31, 50, 2)).float()
    weights = (scale**2 * draw(32, 6)).float() if weighted else None
    unit, points = sites.double() / scale, z.double() / scale
    truth = (naive_squared(points, unit) - (0 if weights is None else draw(32, 6))).argmin(-1)
    if -14 <= exponent <= 16:
        assert torch.equal(assign(z, Diagram(sites, weights)), truth)
    else:
        with pytest.raises(ValueError, match=r"scale the sites|weights must be finite"):
            Diagram(sites, weights)
    if weights is None:  # float64 has a wider range
        assert torch.equal(assign(z.double(), Diagram(sites.double())), truth)
