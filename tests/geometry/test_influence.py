"""Influence and scores against double loops, with the reductions, limits and edges of the definitions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ttvd.geometry import (
    Diagram,
    assign,
    floored_fraction,
    point_influence,
    point_scores,
    soft_labels,
    view_influence,
    view_scores,
)

Oracle = Callable[..., Tensor]
BOUNDED = settings(deadline=None, derandomize=True, max_examples=40)
SEEDS = st.integers(0, 2**16)
SMALL = st.integers(1, 5)
GAMMAS = [-2.0, -0.8, -1e-3, 0.0, 1e-3, 0.5, 1.0, 2.0]


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make(seed: int, classes: int, views: int, dim: int, weighted: bool) -> Diagram:
    diagram = Diagram.from_means(draw(seed, classes, views, dim))
    return Diagram(diagram.sites, draw(seed + 1, classes * views), diagram.groups) if weighted else diagram


@BOUNDED
@given(
    seed=SEEDS,
    sizes=st.tuples(SMALL, SMALL, st.sampled_from([1, 2, 4]), SMALL),
    gamma=st.sampled_from(GAMMAS),
    shift=st.sampled_from([None, 0.0, 3.0]),
    weighted=st.booleans(),
)
def test_both_forms_equal_double_loops(
    naive_influence: Oracle,
    naive_floored: Callable[..., float],
    seed: int,
    sizes: tuple[int, int, int, int],
    gamma: float,
    shift: float | None,
    weighted: bool,
) -> None:
    batch, classes, views, dim = sizes
    diagram, z = make(seed, classes, views, dim, weighted), draw(seed + 2, views, batch, dim)
    forms = ((False, view_influence, point_influence), (True, view_scores, point_scores))
    for centred, by_view, by_point in forms:
        truth = naive_influence(z, diagram, gamma, shift, centred)
        torch.testing.assert_close(by_view(z, diagram, gamma, shift), truth, rtol=1e-7, atol=1e-10)
        truth = naive_influence(z[0], diagram, gamma, shift, centred)
        torch.testing.assert_close(by_point(z[0], diagram, gamma, shift), truth, rtol=1e-7, atol=1e-10)
        same = z[:1].expand_as(z)
        torch.testing.assert_close(by_view(same, diagram, gamma, shift), truth, rtol=1e-7, atol=1e-10)
    for given_z in (z, z[0]):
        share = float(floored_fraction(given_z, diagram, shift))
        assert share == pytest.approx(naive_floored(given_z, diagram, shift), abs=1e-6)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_clusters_of_different_sizes_fall_back_to_influence(naive_influence: Oracle, gamma: float) -> None:
    groups = torch.tensor([1, 0, 1, 2, 1, 2])
    diagram, z = Diagram(draw(0, 6, 3), groups=groups), draw(1, 50, 3)
    truth = naive_influence(z, diagram, gamma)
    torch.testing.assert_close(point_influence(z, diagram, gamma), truth)
    torch.testing.assert_close(point_scores(z, diagram, gamma), truth)
    assert torch.equal(assign(z, diagram, gamma), truth.argmax(-1))
    with pytest.raises(ValueError, match=r"(?i)view|class-major|sites per class"):
        view_influence(z[None].expand(2, 50, 3), diagram, gamma)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_one_site_per_cluster_has_voronoi_cells_for_every_gamma(gamma: float) -> None:
    sites, z, names = draw(2, 7, 3), draw(3, 200, 3), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    plain = assign(z, Diagram(sites))
    assert torch.equal(plain, torch.cdist(z, sites).argmin(-1))
    assert torch.equal(assign(z, Diagram(sites), gamma), plain)
    assert torch.equal(assign(z, Diagram.from_means(sites[:, None]), gamma), plain)
    assert torch.equal(assign(z, Diagram(sites, groups=names), gamma), names[plain])
    assert torch.equal(assign(z[None], Diagram(sites), gamma), plain)
    weights = draw(4, 7)
    heavy = (torch.cdist(z, sites).square() - weights).argmin(-1)
    assert torch.equal(assign(z, Diagram(sites, weights), gamma), heavy)
    assert torch.equal(assign(z, Diagram(sites, weights, torch.arange(7)), gamma), heavy)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_power_influence_at_zero_weights_is_voronoi_influence_at_twice_gamma(gamma: float) -> None:
    voronoi, z = make(5, 4, 3, 6, weighted=False), draw(6, 3, 20, 6)
    power = Diagram(voronoi.sites, torch.zeros(12, dtype=torch.float64), voronoi.groups)
    factor = 2 if gamma == 0 else 1  # the logarithm of a square
    torch.testing.assert_close(
        point_influence(z[0], power, gamma), factor * point_influence(z[0], voronoi, 2 * gamma)
    )
    torch.testing.assert_close(view_scores(z, power, gamma), factor * view_scores(z, voronoi, 2 * gamma))


@pytest.mark.parametrize("weighted", [False, True])
def test_laws_of_space(weighted: bool) -> None:
    diagram, z, rotation = make(7, 4, 2, 3, weighted), draw(8, 30, 3), torch.linalg.qr(draw(9, 3, 3))[0]
    assert diagram.groups is not None
    sites, groups, gamma = diagram.sites, diagram.groups, -0.8
    weights = diagram.weights
    base = point_influence(z, diagram, gamma)
    torch.testing.assert_close(point_influence(z - 2, Diagram(sites - 2, weights, groups), gamma), base)
    turned = point_influence(z @ rotation, Diagram(sites @ rotation, weights, groups), gamma)
    torch.testing.assert_close(turned, base)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    moved = Diagram(sites[order], None if weights is None else weights[order], groups[order])
    torch.testing.assert_close(point_influence(z, moved, gamma), base)
    torch.testing.assert_close(point_influence(z, Diagram(sites, weights, 3 - groups), gamma), base.flip(-1))
    grown = Diagram(3 * sites, None if weights is None else 9 * weights, groups)
    torch.testing.assert_close(
        point_influence(3 * z, grown, gamma), base * 3 ** (2 * gamma if weighted else gamma)
    )
    if weights is not None:
        torch.testing.assert_close(point_influence(z, Diagram(sites, weights + 5, groups), gamma), base)


def test_linear_head_as_power_influence() -> None:
    weight, bias, z = draw(10, 12, 5), draw(11, 12), draw(12, 40, 5)
    logits = z @ weight.T + bias
    head = Diagram.from_linear(weight, bias)
    torch.testing.assert_close(soft_labels(point_influence(z, head, 1.0)), logits.softmax(-1))
    assert torch.equal(assign(z, head, gamma=-0.8), logits.argmax(-1))
    views = Diagram.from_linear(weight, bias, views=4)
    # A shift that dwarfs every power distance makes the influence linear: the sum of a cluster's logits.
    assert torch.equal(assign(z, views, -0.8, shift=1e6), logits.view(40, 3, 4).sum(-1).argmax(-1))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gamma_to_zero_from_both_sides(naive_influence: Oracle, weighted: bool, dtype: torch.dtype) -> None:
    exact, z = make(13, 5, 4, 8, weighted), draw(14, 60, 8)
    limit = naive_influence(z, exact, 0.0)
    top = limit.topk(2).values
    clear = top[:, 0] - top[:, 1] > 1e-3
    assert clear.float().mean() > 0.9
    for gamma in (1e-5, -1e-5, 1e-7, -1e-7):
        scores = point_scores(z.to(dtype), exact.to(dtype=dtype), gamma)
        torch.testing.assert_close((scores / abs(gamma)).double(), limit, rtol=1e-3, atol=1e-3)
        assert torch.equal(scores.argmax(-1)[clear], limit.argmax(-1)[clear])
    found = point_scores(z.to(dtype), exact.to(dtype=dtype), 0.0)
    torch.testing.assert_close(found.double(), limit, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gamma", [-0.8, 0.0, 1.5])
@pytest.mark.parametrize("shift", [None, 4.0])
def test_gradients_equal_finite_differences(gamma: float, shift: float | None) -> None:
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    inputs = [x.requires_grad_() for x in (draw(15, 2, 3, 3), draw(16, 6, 3), draw(17, 6))]
    for by_view, by_point in ((view_influence, point_influence), (view_scores, point_scores)):
        for run in (
            lambda z, s, w, f=by_view: f(z, Diagram(s, w, groups), gamma, shift),
            lambda z, s, w, f=by_point: f(z[0], Diagram(s, w, groups), gamma, shift),
            lambda z, s, w, f=by_point: f(z[0], Diagram(s, None, groups), gamma, shift),
        ):
            assert torch.autograd.gradcheck(run, inputs)


def test_one_class_and_soft_labels() -> None:
    single, z = Diagram.from_means(draw(21, 1, 4, 3)), draw(22, 4, 1, 3)
    assert soft_labels(view_influence(z, single, -0.8)).tolist() == [[1.0]]
    assert assign(z, single, -0.8).tolist() == assign(z[0], single, -0.8).tolist() == [0]
    influence = torch.tensor([[0.0, 2.0], [-1.0, -3.0]], dtype=torch.float64)
    odds = (influence[:, 0] - influence[:, 1]) / 0.5
    torch.testing.assert_close(soft_labels(influence, 0.5)[:, 0], 1 / (1 + (-odds).exp()))
    torch.testing.assert_close(soft_labels(influence), influence.softmax(-1))


CLUSTERS = Diagram.from_means(draw(23, 3, 2, 4))
WRONG: dict[str, Callable[[], object]] = {
    "point form of views": lambda: point_influence(draw(0, 2, 5, 4), CLUSTERS, 1.0),
    "view form of points": lambda: view_influence(draw(0, 5, 4), CLUSTERS, 1.0),
    "another number of views": lambda: view_scores(draw(0, 3, 5, 4), CLUSTERS, 1.0),
    "another number of features": lambda: point_scores(draw(0, 5, 3), CLUSTERS, 1.0),
    "assignment of one vector": lambda: assign(draw(0, 4), CLUSTERS),
    "gamma that is no number": lambda: point_scores(draw(0, 5, 4), CLUSTERS, float("nan")),
    "temperature zero": lambda: soft_labels(torch.zeros(2, 2), tau=0.0),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused(case: str) -> None:
    with pytest.raises(
        (ValueError, TypeError), match=r"(?i)shape|expected|feature|view|gamma|tau|temperature"
    ):
        WRONG[case]()
