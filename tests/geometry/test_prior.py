"""Label shift against loops in plain Python, the likelihood that EM climbs, and what must not matter."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ttvd.geometry import Diagram, power_distances
from ttvd.geometry.prior import shift_weights

BOUNDED = settings(deadline=None, derandomize=True, max_examples=40)
SEEDS = st.integers(0, 2**16)
SIZES = st.tuples(st.integers(1, 9), st.integers(2, 6))
COUNTS = st.sampled_from([0.03, 1.0, 10.0, 300.0])
WAITING = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "_unique2", "unique_dim"}


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def loop_posteriors(rows: list[list[float]], shares: list[float]) -> list[list[float]]:
    """p(k | i) under shares, from scores for equal shares."""
    found = []
    for row in rows:
        top = max(row)
        joint = [share * math.exp(score - top) for share, score in zip(shares, row, strict=True)]
        found.append([value / sum(joint) for value in joint])
    return found


def loop_shares(scores: Tensor, count: float, rounds: int) -> list[float]:
    rows, k = scores.tolist(), scores.shape[1]
    shares = [1 / k] * k
    for _ in range(rounds):
        posteriors = loop_posteriors(rows, shares)
        shares = [(count / k + sum(p[c] for p in posteriors)) / (count + len(rows)) for c in range(k)]
    return shares


def likelihood(scores: Tensor, shares: Tensor, count: float) -> float:
    """Logarithm of the probability of the batch under the shares, and of the shares under their Dirichlet prior."""
    each = (scores.softmax(1) * shares).sum(1).log().sum()
    return float(each + count / len(shares) * shares.log().sum())


def shares_of(moved: Tensor) -> Tensor:
    return moved.exp() / len(moved)


@BOUNDED
@given(seed=SEEDS, sizes=SIZES, count=COUNTS, rounds=st.integers(1, 5))
def test_loops_say_the_same(seed: int, sizes: tuple[int, int], count: float, rounds: int) -> None:
    scores = draw(seed, *sizes)
    wanted = torch.tensor(loop_shares(scores, count, rounds), dtype=torch.float64)
    found = shift_weights(scores, count, rounds)
    torch.testing.assert_close(found, (wanted * sizes[1]).log(), rtol=1e-10, atol=1e-12)
    assert float(shares_of(found).sum()) == pytest.approx(1.0)


@BOUNDED
@given(seed=SEEDS, sizes=SIZES, count=COUNTS)
def test_no_round_lowers_the_likelihood(seed: int, sizes: tuple[int, int], count: float) -> None:
    scores = draw(seed, *sizes)
    values = [likelihood(scores, shares_of(shift_weights(scores, count, n)), count) for n in range(1, 12)]
    start = likelihood(scores, torch.full((sizes[1],), 1 / sizes[1], dtype=torch.float64), count)
    for before, after in zip([start, *values], values, strict=False):
        assert after >= before - 1e-9 * max(1.0, abs(before))


@BOUNDED
@given(seed=SEEDS, sizes=SIZES, count=st.sampled_from([1.0, 10.0]))
def test_many_rounds_end_at_a_fixed_point_that_nothing_beats(
    seed: int, sizes: tuple[int, int], count: float
) -> None:
    """The likelihood is concave, so where no small move inside the simplex raises it, it is greatest."""
    scores, k = draw(seed, *sizes), sizes[1]
    shares = shares_of(shift_weights(scores, count, 800))
    mean = (scores + shares.log()).softmax(1).mean(0)
    torch.testing.assert_close(
        shares, (count / k + sizes[0] * mean) / (count + sizes[0]), rtol=1e-6, atol=1e-9
    )
    best = likelihood(scores, shares, count)
    for other in draw(seed + 1, 6, k).softmax(1):
        for step in (1e-3, 0.1, 1.0):
            assert likelihood(scores, shares.lerp(other, step), count) <= best + 1e-9 * max(1.0, abs(best))


@BOUNDED
@given(seed=SEEDS, sizes=SIZES, count=COUNTS)
def test_constants_of_rows_and_the_order_of_images_and_classes_do_not_matter(
    seed: int, sizes: tuple[int, int], count: float
) -> None:
    scores, generator = draw(seed, *sizes), torch.Generator().manual_seed(seed)
    moved = shift_weights(scores, count)
    torch.testing.assert_close(shift_weights(scores + draw(seed + 1, sizes[0], 1), count), moved)
    torch.testing.assert_close(
        shift_weights(scores[torch.randperm(sizes[0], generator=generator)], count), moved
    )
    classes = torch.randperm(sizes[1], generator=generator)
    torch.testing.assert_close(shift_weights(scores[:, classes], count), moved[classes])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_huge_count_changes_nothing(dtype: torch.dtype) -> None:
    scores = draw(0, 8, 5, dtype=dtype)
    assert torch.equal(shift_weights(scores, 1e300), torch.zeros(5, dtype=dtype))
    assert shift_weights(scores, 1e6).abs().max() < 1e-4


def test_images_that_say_nothing_change_nothing() -> None:
    torch.testing.assert_close(shift_weights(torch.zeros(7, 4), 1.0), torch.zeros(4))


@pytest.mark.parametrize("shares", [[0.7, 0.2, 0.1], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]])
def test_shares_of_classes_that_lie_apart_are_found(shares: list[float]) -> None:
    """Gaussian classes around the corners of a triangle; in equal shares their diagram is Voronoi's."""
    generator, n = torch.Generator().manual_seed(0), 3000
    labels = torch.multinomial(torch.tensor(shares), n, replacement=True, generator=generator)
    sites = 4 * torch.eye(3).double()
    z = sites[labels] + torch.randn(n, 3, generator=generator, dtype=torch.float64)
    moved = shift_weights(-power_distances(z, Diagram(sites)) / 2, count=1.0, rounds=10)
    true = labels.bincount(minlength=3) / n
    torch.testing.assert_close(shares_of(moved), true.double(), rtol=0, atol=5e-3)


def test_classes_that_overlap_are_told_apart_better_and_the_weights_are_those_of_the_true_shares() -> None:
    """For unit Gaussians the exact posterior under shares s has weights 2 log s in place of 0, and the same sites."""
    generator, n, shares = torch.Generator().manual_seed(1), 20000, torch.tensor([0.9, 0.1]).double()
    labels = torch.multinomial(shares, n, replacement=True, generator=generator)
    sites = torch.tensor([[-0.8], [0.8]]).double()
    z = sites[labels] + torch.randn(n, 1, generator=generator, dtype=torch.float64)
    scores = -power_distances(z, Diagram(sites)) / 2
    moved = shift_weights(scores, count=1.0, rounds=100)
    torch.testing.assert_close(moved, (2 * shares).log(), rtol=0, atol=0.1)
    exact = Diagram(sites, 2 * moved)
    assert torch.equal((scores + moved).argmax(1), power_distances(z, exact).argmin(1))
    before, after = ((s.argmax(1) == labels).double().mean() for s in (scores, scores + moved))
    assert after > before + 0.05


@pytest.mark.parametrize("count", [1e-6, 1.0, 1e6])
def test_one_image_is_enough_and_moves_towards_itself(count: float) -> None:
    moved = shift_weights(torch.tensor([[2.0, 0.0, 0.0]]), count)
    assert moved.isfinite().all()
    assert moved[0] >= 0 >= moved[1] == moved[2]


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_extreme_scores_stay_finite(size: float) -> None:
    scores = size * torch.tensor([[1.0, -1.0, 0.0], [1.0, 1.0, -1.0], [-1.0, 0.0, 0.0]])
    assert shift_weights(scores, 1e-3, 50).isfinite().all()


def test_half_precision_is_left_and_nothing_waits_for_the_device(
    watched: Callable[[Callable[[], object]], tuple[int, set[str]]],
) -> None:
    scores = draw(0, 8, 5).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = shift_weights(scores, 2.0)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    torch.testing.assert_close(found.double(), shift_weights(scores.double(), 2.0), rtol=1e-5, atol=1e-6)
    assert not watched(lambda: shift_weights(scores, 2.0))[1] & WAITING


@BOUNDED
@given(seed=SEEDS, sizes=SIZES, count=COUNTS)
def test_a_count_may_be_a_tensor(seed: int, sizes: tuple[int, int], count: float) -> None:
    scores = draw(seed, *sizes)
    found = shift_weights(scores, torch.tensor(count, dtype=torch.float64))
    torch.testing.assert_close(found, shift_weights(scores, count), rtol=1e-12, atol=1e-14)
    narrow = shift_weights(scores.float(), torch.tensor(count))
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), found, rtol=1e-3, atol=1e-4)


def test_a_count_that_is_a_tensor_is_not_looked_at(
    watched: Callable[[Callable[[], object]], tuple[int, set[str]]],
) -> None:
    """Nor where it is not one; the price is that nobody refuses it."""
    scores, count = draw(0, 8, 5).float(), torch.tensor(2.0)
    names = watched(lambda: shift_weights(scores, count))[1]
    assert "log" in names
    assert not names & WAITING
    assert not shift_weights(scores, torch.tensor(math.nan)).isfinite().any()


@pytest.mark.parametrize("count", [0.0, -1.0, math.inf, math.nan])
def test_counts_that_are_none(count: float) -> None:
    with pytest.raises(ValueError, match="count must be a positive, finite number of pseudo-images"):
        shift_weights(torch.zeros(2, 3), count)


def test_other_things_that_cannot_be_meant() -> None:
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        shift_weights(torch.zeros(2, 3), 1.0, 0)
    for scores in (torch.zeros(3), torch.zeros(0, 3)):
        with pytest.raises(ValueError, match=r"scores \(b, k\) of at least one image"):
            shift_weights(scores, 1.0)
