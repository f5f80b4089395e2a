"""Orders over several domains, batches, and digests."""

from collections.abc import Iterator
from itertools import count, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttvd.data.streams import (
    batch_iterable,
    batches,
    continual,
    dirichlet,
    draw_onset,
    gradual,
    iid,
    mixed,
    onset,
    order_hash,
    rare,
    recurring,
)


def test_continual_keeps_each_domain_together_and_in_order() -> None:
    orders = [iid(30, seed=0), iid(20, seed=1), iid(30, seed=0)]
    rows = continual(orders)
    assert rows.dtype == np.int64
    assert rows[:, 0].tolist() == [0] * 30 + [1] * 20 + [2] * 30
    assert np.array_equal(rows[:, 1], np.concatenate(orders))


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=5), seed=st.integers(0, 2**32))
def test_mixed_is_a_permutation_that_keeps_the_order_inside_a_domain(sizes: list[int], seed: int) -> None:
    orders = [iid(size, seed=domain) for domain, size in enumerate(sizes)]
    rows = mixed(orders, seed)
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, continual(orders).tolist()))
    for domain, order in enumerate(orders):
        assert np.array_equal(rows[rows[:, 0] == domain, 1], order)
    assert np.array_equal(rows, mixed(orders, seed))


def test_mixed_really_mixes() -> None:
    orders = [iid(500, seed=domain) for domain in range(4)]
    domains = mixed(orders, seed=0)[:, 0]
    for quarter in np.split(domains, 4):
        assert np.abs(np.bincount(quarter, minlength=4) - 125).max() < 50
    assert not np.array_equal(domains, mixed(orders, seed=1)[:, 0])


def test_mixed_domains_keep_correlated_classes() -> None:
    labels = np.repeat(np.arange(10), 100)
    order = dirichlet(labels, seed=0, alpha=1e-6)
    rows = mixed([order] * 3, seed=0)
    stream = labels[rows[:, 1]]
    assert np.mean(np.diff(stream) == 0) > 0.8
    assert np.mean(np.diff(rows[:, 0]) == 0) < 0.4


def test_onset_is_clean_shifted_and_clean_again() -> None:
    clean, shifted = iid(100, seed=0), iid(50, seed=1)
    rows = onset(clean, shifted, (30, 40, 20))
    assert rows.dtype == np.int64
    assert rows[:, 0].tolist() == [0] * 30 + [1] * 40 + [0] * 20
    assert np.array_equal(rows[rows[:, 0] == 0, 1], clean[:50])
    assert np.array_equal(rows[rows[:, 0] == 1, 1], shifted[:40])
    for lengths in ((90, 1, 20), (1, 51, 1), (0, 1, 1)):
        with pytest.raises(ValueError, match="there are 100 and 50"):
            onset(clean, shifted, lengths)


def test_lengths_of_onsets_are_whole_batches_of_every_size_in_range() -> None:
    drawn = [draw_onset(seed, batch_size=8, fewest=(1, 2, 3), most=(3, 3, 3)) for seed in range(100)]
    assert {tuple(length % 8 for length in lengths) for lengths in drawn} == {(0, 0, 0)}
    seen = [{lengths[part] // 8 for lengths in drawn} for part in range(3)]
    assert seen == [{1, 2, 3}, {2, 3}, {3}]
    assert draw_onset(5) == draw_onset(5)
    with pytest.raises(ValueError, match="fewest"):
        draw_onset(0, fewest=(0, 1, 1))


@given(sizes=st.lists(st.integers(4, 20), min_size=1, max_size=4), rounds=st.integers(1, 4))
def test_recurring_domains_come_in_the_same_order_and_show_each_sample_once(
    sizes: list[int], rounds: int
) -> None:
    orders = [iid(size, seed=domain) for domain, size in enumerate(sizes)]
    rows = recurring(orders, rounds)
    runs = rows[np.flatnonzero(np.diff(rows[:, 0], prepend=-1)), 0].tolist()
    assert runs == (list(range(len(sizes))) * rounds if len(sizes) > 1 else [0])
    for domain, order in enumerate(orders):
        assert np.array_equal(rows[rows[:, 0] == domain, 1], order)
    with pytest.raises(ValueError, match="rounds"):
        recurring(orders, 21)


def test_one_batch_in_ten_is_rare_at_places_that_differ() -> None:
    usual, shifted = iid(1000, seed=0), iid(30, seed=1)
    rows = rare(usual, shifted, seed=0, batch_size=10)
    domains = rows[:, 0].reshape(-1, 10)
    assert (domains == domains[:, :1]).all()
    groups = domains[:, 0].reshape(-1, 10)
    assert groups.sum(1).tolist() == [1] * 11
    assert len(set(groups.argmax(1).tolist())) > 3
    assert np.array_equal(rows[rows[:, 0] == 0, 1], usual[:990])
    assert np.array_equal(rows[rows[:, 0] == 1, 1], np.resize(shifted, 110))
    for every, size in ((1, 10), (0, 10), (200, 10), (2, 2000)):
        with pytest.raises(ValueError, match="usual samples"):
            rare(usual, shifted, seed=0, batch_size=size, every=every)


def test_gradual_rises_and_falls_for_each_corruption() -> None:
    domains = gradual(["fog", "snow"])
    assert [severity for _, severity in domains] == [1, 2, 3, 4, 5, 4, 3, 2, 1] * 2
    assert [name for name, _ in domains] == ["fog"] * 9 + ["snow"] * 9
    assert gradual(["fog"], peak=1) == [("fog", 1)]


@given(n=st.integers(1, 1200), size=st.integers(1, 1300), drop_last=st.booleans())
def test_batches_are_the_order_cut_in_pieces(n: int, size: int, drop_last: bool) -> None:
    order = iid(n, seed=0)
    if drop_last and n < size:
        with pytest.raises(ValueError, match="set drop_last=False"):
            batches(order, size, drop_last=drop_last)
        return
    parts = batches(order, size, drop_last=drop_last)
    assert all(len(part) == size for part in parts[:-1])
    assert 1 <= len(parts[-1]) <= size
    kept = n // size * size if drop_last else n
    assert np.array_equal(np.concatenate(parts), order[:kept])
    assert list(batch_iterable(order.tolist(), size, drop_last=drop_last)) == [
        part.tolist() for part in parts
    ]


def test_rows_of_several_domains_are_cut_too() -> None:
    parts = batches(continual([iid(5, seed=0), iid(4, seed=0)]), 4)
    assert [part.shape for part in parts] == [(4, 2), (4, 2), (1, 2)]


def test_endless_source_is_read_one_batch_at_a_time() -> None:
    taken: list[int] = []

    def watch() -> Iterator[int]:
        for value in count():
            taken.append(value)
            yield value

    stream = batch_iterable(watch(), 3)
    assert taken == []
    assert next(stream) == [0, 1, 2]
    assert taken == [0, 1, 2]
    assert list(islice(stream, 2)) == [[3, 4, 5], [6, 7, 8]]
    assert list(batch_iterable([], 4)) == []


def test_digest_tells_orders_apart_and_forgets_storage() -> None:
    order = iid(50, seed=0)
    rows = continual([order[:25], order[25:]])
    assert order_hash(order) == order_hash(order.astype(">i8")) == order_hash(order.astype(np.int32))
    assert order_hash(rows) == order_hash(np.asfortranarray(rows))
    others = [order[::-1], order[:-1], iid(50, seed=1), order.reshape(25, 2), rows]
    assert len({order_hash(other) for other in [order, *others]}) == 6


def test_bad_input_is_refused() -> None:
    for size in (0, -3):
        with pytest.raises(ValueError, match="at least one sample"):
            batches(iid(5, seed=0), size)
        with pytest.raises(ValueError, match="at least one sample"):
            batch_iterable([1, 2], size)
    with pytest.raises(ValueError, match="0 samples give no batch of 2"):
        batches(np.array([], dtype=np.int64), 2)
    with pytest.raises(ValueError, match="at least one domain"):
        continual([])
    with pytest.raises(ValueError, match="domain 1 must be a non-empty"):
        mixed([iid(3, seed=0), []], seed=0)
    with pytest.raises(ValueError, match="at least one name"):
        gradual([])
    with pytest.raises(ValueError, match="peak"):
        gradual(["fog"], peak=0)
