"""Orders of one domain: permutations, seeds, and the shape that each promises."""

from collections.abc import Callable
from itertools import groupby

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttvd.data.streams import class_sorted, dirichlet, dirichlet_slots, iid, imbalanced, label_shift

Labels = npt.NDArray[np.int64]
MakeOrder = Callable[[Labels, int], Labels]

PERMUTATIONS: list[MakeOrder] = [iid, class_sorted, dirichlet, dirichlet_slots]
ALL: list[MakeOrder] = [*PERMUTATIONS, imbalanced, label_shift]


def make_labels(k: int, per_class: int) -> Labels:
    return np.random.default_rng(7).permutation(np.repeat(np.arange(k), per_class))


def measure_runs(labels: Labels) -> list[int]:
    return [len(list(group)) for _, group in groupby(labels.tolist())]


@pytest.mark.parametrize("order", PERMUTATIONS)
@settings(max_examples=25, deadline=None)
@given(k=st.integers(1, 12), per_class=st.integers(20, 60), seed=st.integers(0, 2**32))
def test_every_sample_comes_once(order: MakeOrder, k: int, per_class: int, seed: int) -> None:
    indices = order(make_labels(k, per_class), seed)
    assert indices.dtype == np.int64
    assert np.array_equal(np.sort(indices), np.arange(k * per_class))


@pytest.mark.parametrize("order", ALL)
def test_order_depends_on_its_arguments_alone(order: MakeOrder) -> None:
    labels = make_labels(5, 40)
    kept = labels.copy()
    np.random.seed(1)  # noqa: NPY002 (the global generator is what must neither matter nor move)
    untouched = np.random.random()  # noqa: NPY002
    np.random.seed(1)  # noqa: NPY002
    first = order(labels, 3)
    assert np.random.random() == untouched  # noqa: NPY002
    assert np.array_equal(first, order(labels, 3))
    assert not np.array_equal(first, order(labels, 4))
    assert np.array_equal(labels, kept)


@pytest.mark.parametrize("order", ALL)
def test_class_numbers_need_not_be_contiguous(order: MakeOrder) -> None:
    labels = make_labels(4, 50)
    assert np.array_equal(order(labels, 0), order(labels * 10 + 3, 0))


def test_iid_takes_a_number_or_labels() -> None:
    assert np.array_equal(iid(100, seed=5), iid(np.zeros(100, dtype=np.int64), seed=5))


def test_sorted_order_has_one_run_for_each_class() -> None:
    labels = np.repeat([0, 1, 2, 3], [10, 20, 30, 40])
    stream = labels[class_sorted(labels, seed=0)]
    assert sorted(measure_runs(stream)) == [10, 20, 30, 40]
    firsts = {int(labels[class_sorted(labels, seed=seed)][0]) for seed in range(40)}
    assert firsts == {0, 1, 2, 3}


def test_dirichlet_runs_shrink_as_alpha_grows() -> None:
    labels = make_labels(10, 200)
    runs = [np.mean(measure_runs(labels[dirichlet(labels, 0, alpha=a)])) for a in (0.01, 0.1, 1.0, 1e6)]
    assert runs == sorted(runs, reverse=True)
    assert runs[0] > 80
    # In the limit each of the 10 chunks holds 20 samples of each class, one class after the other.
    assert runs[-1] == pytest.approx(20, rel=0.05)


def test_dirichlet_limit_gives_every_chunk_the_frequencies_of_the_set() -> None:
    labels = make_labels(10, 200)
    for chunk in np.split(labels[dirichlet(labels, 0, alpha=1e9)], 10):
        # Rounding moves a border of the chunks by at most one sample for each of the ten classes.
        assert np.abs(np.bincount(chunk, minlength=10) - 20).max() <= 10
    skewed = np.split(labels[dirichlet(labels, 0, alpha=0.1)], 10)
    assert max(np.bincount(chunk).max() for chunk in skewed) > 80


def test_dirichlet_chunks_hold_their_minimum_and_are_balanced() -> None:
    """With alpha near zero each class goes whole into one chunk, and a full chunk gets no second class."""
    labels = make_labels(10, 100)
    assert measure_runs(labels[dirichlet(labels, 0, alpha=1e-6)]) == [100] * 10
    slots = [tuple(labels[dirichlet_slots(labels, seed, alpha=1e-6)][::100]) for seed in range(20)]
    assert len(set(slots)) > 10


def test_dirichlet_gives_up_with_advice() -> None:
    labels = make_labels(20, 5)
    with pytest.raises(ValueError, match="raise alpha or lower min_chunk"):
        dirichlet(labels, 0, alpha=0.5, min_chunk=5)
    with pytest.raises(ValueError, match="cannot fill 20 chunks of 6"):
        dirichlet(labels, 0, min_chunk=6)


def test_imbalanced_stretches_have_the_stated_odds() -> None:
    labels = make_labels(10, 300)
    stream = labels[imbalanced(labels, 0, ratio=27.0, length=50_000)]
    stretches = stream.reshape(10, 5000)
    majors = [int(np.bincount(stretch).argmax()) for stretch in stretches]
    assert sorted(majors) == list(range(10))
    for major, stretch in zip(majors, stretches, strict=True):
        frequency = np.bincount(stretch, minlength=10) / 5000
        assert frequency[major] == pytest.approx(27 / 36, abs=0.03)
        assert np.delete(frequency, major) == pytest.approx(1 / 36, abs=0.012)


def test_imbalanced_extremes() -> None:
    labels = make_labels(5, 20)
    assert measure_runs(labels[imbalanced(labels, 0, ratio=np.inf)]) == [20] * 5
    counts = np.bincount(labels[imbalanced(labels, 0, ratio=1.0, length=50_000)])
    assert counts / 50_000 == pytest.approx(0.2, abs=0.01)
    drawn = imbalanced(labels, 0, ratio=1.0, length=50_000)
    assert np.bincount(drawn, minlength=100).min() > 400  # every sample of a class is equally likely
    assert len(imbalanced(np.zeros(7, dtype=np.int64), 0)) == 7


@settings(max_examples=25, deadline=None)
@given(k=st.integers(1, 8), alpha=st.floats(0.01, 100), seed=st.integers(0, 10**6), share=st.floats(0.05, 1))
def test_label_shift_repeats_nothing_and_keeps_its_size(
    k: int, alpha: float, seed: int, share: float
) -> None:
    labels = make_labels(k, 30)
    size = max(1, int(share * len(labels)))
    fixed = label_shift(labels, seed, alpha=alpha, size=size)
    assert len(fixed) == len(set(fixed.tolist())) == size
    free = label_shift(labels, seed, alpha=alpha)
    assert 1 <= len(free) == len(set(free.tolist())) <= len(labels)


def test_label_shift_is_strong_for_small_alpha_and_absent_for_large() -> None:
    labels = make_labels(10, 500)
    strong = np.bincount(labels[label_shift(labels, 0, alpha=0.05, size=500)], minlength=10)
    none = np.bincount(labels[label_shift(labels, 0, alpha=1e6, size=500)], minlength=10)
    assert strong.max() > 250
    assert none.max() < 80


@pytest.mark.parametrize("order", ALL)
def test_bad_labels_are_refused(order: MakeOrder) -> None:
    for labels in (np.array([], dtype=np.int64), np.zeros((2, 2), dtype=np.int64), np.array([0.5, 1.0])):
        with pytest.raises(ValueError, match="non-empty 1-D array of integers"):
            order(np.asarray(labels), 0)
    with pytest.raises(TypeError, match="seed must be an integer"):
        order(make_labels(2, 20), None)  # type: ignore[arg-type]


def test_bad_options_are_refused() -> None:
    labels = make_labels(3, 20)
    for alpha in (0.0, -1.0, np.inf, np.nan):
        for order in (dirichlet, dirichlet_slots, label_shift):
            with pytest.raises(ValueError, match="alpha must be positive"):
                order(labels, 0, alpha=alpha)
    with pytest.raises(ValueError, match="each class from 0 to 3 needs a sample"):
        dirichlet(labels, 0, num_classes=4)
    with pytest.raises(ValueError, match="at least one sample"):
        iid(0, seed=0)
    with pytest.raises(ValueError, match="max_slots"):
        dirichlet_slots(labels, 0, max_slots=0)
    with pytest.raises(ValueError, match="ratio"):
        imbalanced(labels, 0, ratio=0.5)
    with pytest.raises(ValueError, match="number of classes, 3, got 2"):
        imbalanced(labels, 0, length=2)
    for size in (0, 61):
        with pytest.raises(ValueError, match="from 1 to the number of samples, 60"):
            label_shift(labels, 0, size=size)
