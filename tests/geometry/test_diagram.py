"""A diagram as a value: what it accepts, what it refuses, the Lemma, and the partition that it stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import KDTree
from torch import Tensor

from ttvd.geometry import Diagram, assign, power_distances

BOUNDED = settings(deadline=None, derandomize=True, max_examples=30)
SEEDS = st.integers(0, 2**16)
SMALL = st.integers(1, 6)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_plain_diagram_properties() -> None:
    diagram = Diagram(draw(0, 5, 3))
    assert (diagram.num_sites, diagram.dim, diagram.num_classes, diagram.views) == (5, 3, 5, 1)
    assert diagram.weights is diagram.groups is None


def test_ragged_and_interleaved_groups_have_classes_but_no_views() -> None:
    ragged = Diagram(draw(1, 5, 2), groups=torch.tensor([0, 0, 1, 1, 1]))
    interleaved = Diagram(draw(1, 4, 2), groups=torch.tensor([0, 1, 0, 1]))
    assert ragged.num_classes == interleaved.num_classes == 2
    for diagram in (ragged, interleaved):
        with pytest.raises(ValueError, match=r"(?i)view|class-major|sites per class"):
            _ = diagram.views


def test_diagram_is_frozen_and_compared_by_identity() -> None:
    diagram, twin = Diagram(torch.eye(2)), Diagram(torch.eye(2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        diagram.sites = torch.zeros(2, 2)  # type: ignore[misc]
    assert diagram != twin
    assert len({diagram, twin}) == 2


def test_from_means_is_class_major() -> None:
    means = draw(2, 4, 3, 5)
    diagram = Diagram.from_means(means)
    assert (diagram.num_sites, diagram.num_classes, diagram.views, diagram.dim) == (12, 4, 3, 5)
    assert diagram.groups is not None
    assert diagram.groups.dtype == torch.int64
    for label in range(4):
        for view in range(3):
            assert torch.equal(diagram.sites[label * 3 + view], means[label, view])
            assert int(diagram.groups[label * 3 + view]) == label
    plain = Diagram.from_means(means[:, 0])
    assert plain.groups is plain.weights is None
    assert torch.equal(plain.sites, means[:, 0])


@BOUNDED
@given(seed=SEEDS, classes=SMALL, views=st.sampled_from([1, 2, 4]), dim=SMALL, biased=st.booleans())
def test_from_linear_is_the_lemma(seed: int, classes: int, views: int, dim: int, biased: bool) -> None:
    weight = draw(seed, classes * views, dim)
    bias = draw(seed + 1, classes * views) if biased else None
    diagram = Diagram.from_linear(weight, bias, views=views)
    assert diagram.weights is not None
    assert (diagram.num_classes, diagram.views) == (classes, views)
    for row in range(classes * views):
        offset = 0.0 if bias is None else float(bias[row])
        norm = sum(float(w) ** 2 for w in weight[row])
        assert float(diagram.weights[row]) == pytest.approx(offset + norm / 4, abs=1e-12)
        assert torch.equal(diagram.sites[row], weight[row] / 2)
        if diagram.groups is not None:
            assert int(diagram.groups[row]) == row // views
    back_weight, back_bias = diagram.to_linear()
    torch.testing.assert_close(back_weight, weight)
    torch.testing.assert_close(back_bias, torch.zeros(len(weight)).double() if bias is None else bias)


@BOUNDED
@given(seed=SEEDS, batch=SMALL, sites=SMALL, dim=SMALL)
def test_softmax_of_negative_power_distance_is_softmax_of_logits(
    seed: int, batch: int, sites: int, dim: int
) -> None:
    weight, bias, z = draw(seed, sites, dim), draw(seed + 1, sites), draw(seed + 2, batch, dim)
    power = power_distances(z, Diagram.from_linear(weight, bias))
    logits = torch.nn.functional.linear(z, weight, bias)
    torch.testing.assert_close((-power).softmax(-1), logits.softmax(-1))
    torch.testing.assert_close(power, z.square().sum(-1, keepdim=True) - logits)


def test_voronoi_diagram_is_the_linear_head_of_its_means() -> None:
    means, z = draw(3, 6, 4), draw(4, 200, 4)
    weight, bias = Diagram(means).to_linear()
    torch.testing.assert_close(weight, 2 * means)
    torch.testing.assert_close(bias, -means.square().sum(-1))
    assert torch.equal((z @ weight.T + bias).argmax(-1), assign(z, Diagram(means)))


def test_to_returns_a_new_diagram_and_keeps_groups() -> None:
    diagram = Diagram.from_linear(draw(5, 4, 3), draw(6, 4), views=2)
    half = diagram.to(dtype=torch.float32)
    assert half.weights is not None
    assert diagram.weights is not None
    assert half.groups is not None
    assert half.sites.dtype == half.weights.dtype == torch.float32
    assert diagram.sites.dtype == diagram.weights.dtype == torch.float64
    assert half.groups.tolist() == [0, 0, 1, 1]
    assert half.groups.dtype == torch.int64
    assert Diagram(torch.eye(3)).to(device="cpu").weights is None


GOOD = torch.eye(3)
BAD: dict[str, Callable[[], Any]] = {
    "sites of rank 1": lambda: Diagram(torch.ones(3)),
    "sites of rank 3": lambda: Diagram(torch.ones(2, 2, 2)),
    "integer sites": lambda: Diagram(torch.tensor([[0, 1], [1, 0]])),
    "nan site": lambda: Diagram(torch.tensor([[0.0, 1.0], [float("nan"), 0.0]])),
    "infinite site": lambda: Diagram(torch.tensor([[0.0, 1.0], [float("inf"), 0.0]])),
    "too few weights": lambda: Diagram(GOOD, torch.ones(2)),
    "weights of rank 2": lambda: Diagram(GOOD, torch.ones(3, 1)),
    "integer weights": lambda: Diagram(GOOD, torch.ones(3, dtype=torch.int64)),
    "nan weight": lambda: Diagram(GOOD, torch.tensor([0.0, float("nan"), 0.0])),
    "infinite weight": lambda: Diagram(GOOD, torch.tensor([0.0, float("inf"), 0.0])),
    "too few groups": lambda: Diagram(GOOD, groups=torch.tensor([0, 1])),
    "missing class": lambda: Diagram(GOOD, groups=torch.tensor([0, 2, 2])),
    "negative class": lambda: Diagram(GOOD, groups=torch.tensor([-1, 0, 1])),
    "floating groups": lambda: Diagram(GOOD, groups=torch.tensor([0.0, 1.0, 2.0])),
    "means of rank 1": lambda: Diagram.from_means(torch.ones(3)),
    "means of rank 4": lambda: Diagram.from_means(draw(0, 2, 2, 2, 2)),
    "head of rank 1": lambda: Diagram.from_linear(torch.ones(3)),
    "bias of another length": lambda: Diagram.from_linear(GOOD, torch.ones(2)),
    "views that do not divide": lambda: Diagram.from_linear(GOOD, views=2),
    "no views": lambda: Diagram.from_linear(GOOD, views=0),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused(case: str) -> None:
    words = "(?i)site|weight|group|class|mean|bias|view|finite|float|shape|rank"
    with pytest.raises((ValueError, TypeError), match=words):
        BAD[case]()


@BOUNDED
@given(seed=SEEDS, size=st.integers(2, 40), data=st.data())
def test_duplicate_sites_are_named(seed: int, size: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, size - 2))
    second = data.draw(st.integers(first + 1, size - 1))
    sites = draw(seed, size, 3)
    sites[second] = sites[first]
    with pytest.raises(ValueError, match=rf"\b{first}\b.*\b{second}\b"):
        Diagram(sites)
    assert Diagram(sites, torch.zeros(size, dtype=torch.float64)).num_sites == size


def test_duplicates_are_decided_exactly() -> None:
    with pytest.raises(ValueError, match=r"\b0\b.*\b1\b"):
        Diagram(torch.tensor([[0.0, 1.0], [-0.0, 1.0]]))
    mirrored = torch.tensor([[1.0, 2.0], [2.0, 1.0], [0.0, 3.0], [3.0, 0.0], [1.5, 1.5], [-1.0, -2.0]])
    assert Diagram(mirrored).num_sites == 6
    near = torch.stack([torch.ones(4), torch.nextafter(torch.ones(4), torch.full((4,), 2.0))])
    assert Diagram(near).num_sites == 2


def test_heavier_duplicate_wins() -> None:
    sites = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 0.0]])
    labels = assign(
        torch.tensor([[0.0, 0.0], [0.5, 1.0], [5.0, 0.0]]), Diagram(sites, torch.tensor([1.0, 0, 2]))
    )
    assert labels.tolist() == [2, 2, 1]


@pytest.mark.parametrize("dim", [1, 2, 7])
def test_assignment_equals_kdtree(dim: int) -> None:
    sites, z = draw(7, 30, dim), 2 * draw(8, 500, dim)
    labels = assign(z, Diagram(sites))
    assert labels.dtype == torch.int64
    np.testing.assert_array_equal(labels.numpy(), KDTree(sites.numpy()).query(z.numpy())[1])


def test_assignment_and_scores_equal_nearest_centroid_with_priors() -> None:
    pytest.importorskip("sklearn", minversion="1.6")
    from sklearn.neighbors import NearestCentroid

    truth = np.arange(120) % 4
    points = draw(9, 120, 3).numpy() + 1.5 * draw(10, 4, 3).numpy()[truth]
    priors, z = np.array([0.1, 0.2, 0.3, 0.4]), draw(11, 300, 3).numpy() * 2
    oracle = NearestCentroid(priors=priors.tolist()).fit(points, truth)
    spread = oracle.within_class_std_dev_
    diagram = Diagram(torch.tensor(oracle.centroids_ / spread), torch.tensor(2 * np.log(priors)))
    queries = torch.tensor(z / spread)
    np.testing.assert_allclose(-power_distances(queries, diagram).numpy(), oracle.decision_function(z))
    np.testing.assert_array_equal(assign(queries, diagram).numpy(), oracle.predict(z))
