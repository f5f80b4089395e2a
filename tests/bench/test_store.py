import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.store import FACTS, make_row, make_run, temporary_folder
from ttvd.bench import Record, Row
from ttvd.bench.spec import Domain, Member, Run
from ttvd.bench.store import Figure, Store, StoreError


@pytest.fixture
def path() -> Iterator[Path]:
    with temporary_folder() as folder:
        yield folder / "runs.db"


def numbers(**kwargs: Any) -> st.SearchStrategy[float]:
    """Floats but minus zero, of which SQLite makes zero."""
    return st.floats(allow_nan=False, **kwargs).map(lambda value: value + 0.0)


@st.composite
def rows(draw: st.DrawFn, bins: int, domains: int) -> Row:
    counts = draw(st.lists(st.integers(0, 1000), min_size=bins, max_size=bins))
    right = [draw(st.integers(0, count)) for count in counts]
    metrics: dict[str, float | list[float]] = {"n": sum(counts), "correct": sum(right)}
    metrics |= {name: draw(numbers()) for name in ("nll_sum", "brier_sum", "batch_ece_sum")}
    metrics["bin_count"] = [float(count) for count in counts]
    metrics["bin_confidence"] = draw(st.lists(st.floats(allow_nan=False), min_size=bins, max_size=bins))
    metrics["bin_correct"] = [float(count) for count in right]
    return Row(metrics, draw(numbers()), draw(numbers()), draw(st.integers(0, domains - 1)))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    values = (
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | numbers(allow_infinity=False) | st.text()
    )
    parameters = st.dictionaries(st.text(), values | st.lists(values), max_size=3)
    domains = tuple(Domain("fog", severity) for severity in range(1, draw(st.integers(2, 4))))
    spec = replace(make_run().spec, domains=domains, parameters=draw(parameters), options=draw(parameters))
    spec = replace(spec, limit=draw(st.none() | st.integers(1)), sites=draw(numbers(allow_infinity=False)))
    bins = draw(st.integers(1, 20))
    record = Record(tuple(draw(st.lists(rows(bins, len(domains)), min_size=1, max_size=4))))
    facts = replace(FACTS, device=draw(st.text()), peak=draw(st.none() | st.integers(0, 2**60)))
    return Run(spec, record, facts)


@settings(max_examples=60, deadline=None)
@given(runs())
def test_a_run_comes_back_as_it_was(run: Run) -> None:
    with temporary_folder() as folder, Store(folder / "runs.db") as store:
        assert store.add(run)
        back = store.load([run.spec.key])[run.spec.key]
    assert back == run
    assert repr(back.record) == repr(run.record)  # the same types, and the same digits of every number


def test_a_share_that_is_not_a_number_comes_back(path: Path) -> None:
    run = make_run(rows=(make_row(kept=float("nan")), make_row()))
    with Store(path) as store:
        store.add(run)
        assert repr(store.load([run.spec.key])[run.spec.key]) == repr(run)


def test_a_run_is_added_once(path: Path) -> None:
    first, again = make_run(), make_run(rows=(make_row(0),))
    with Store(path) as store:
        assert store.add(first) is True
        assert store.add(again) is False
        assert store.load([first.spec.key]) == {first.spec.key: first}
        assert store.done() == {first.spec.key}


def test_load_keeps_the_order_and_leaves_out_what_is_not_done(path: Path) -> None:
    some = [make_run(seed) for seed in range(5)]
    keys = [run.spec.key for run in some]
    with Store(path) as store:
        for run in reversed(some[1:]):
            store.add(run)
    with Store(path, readonly=True) as store:
        assert list(store.load([*keys, keys[2], "f" * 16])) == keys[1:]
        assert store.load([]) == {}


def test_summaries_are_made_of_the_rows(path: Path) -> None:
    some = [
        make_run(seed, rows=(make_row(seed, kept=0.2), make_row(1, n=12, kept=1.0))) for seed in (3, 1, 2)
    ]
    with Store(path) as store:
        for run in some:
            store.add(run)
        summaries = store.summaries()
    assert [(one.key, one.spec, one.facts, one.batches) for one in summaries] == [
        (run.spec.key, run.spec, FACTS, 2) for run in some
    ]
    for summary, run in zip(summaries, some, strict=True):
        assert summary.metrics == pytest.approx(run.record.metrics().compute(), rel=1e-12)
        assert summary.kept == pytest.approx(0.8)


def test_failures_last_until_the_run_succeeds(path: Path) -> None:
    run, other = make_run(0), make_run(1)
    with Store(path) as store:
        store.fail(run.spec, "first")
        store.fail(other.spec, "Traceback: \x00 \N{SNOWMAN} \udcff")  # of a file name that is not UTF-8
        store.fail(run.spec, "second")
        assert [(one.key, one.spec, one.text) for one in store.failures()] == [
            (other.spec.key, other.spec, "Traceback: \x00 \N{SNOWMAN} \\udcff"),
            (run.spec.key, run.spec, "second"),
        ]
        assert all(abs(one.when - time.time()) < 60 for one in store.failures())
        store.add(run)
        store.fail(run.spec, "too late")
        assert [one.key for one in store.failures()] == [other.spec.key]


def test_find_completes_a_key(path: Path) -> None:
    done, failed, asked = (make_run(seed).spec.key for seed in range(3))
    with Store(path) as store:
        store.add(make_run(0))
        store.fail(make_run(1).spec, "")
        store.save_recipe("smoke", "", [Member("smoke", "a", "test", make_run(2).spec)])
        for key in (done, failed, asked):
            assert store.find(key) == store.find(key[:6]) == store.find(key[:6].upper()) == key
        with pytest.raises(ValueError, match="begins with 'xyz'"):
            store.find("xyz")
        with pytest.raises(ValueError, match=r"3 runs .*give more digits"):
            store.find("")


def test_recipes_keep_their_members_in_order(path: Path) -> None:
    members = [
        Member(
            "smoke", f"line {number % 2}", "test", make_run(number % 3).spec, {"lr": 0.1}, {"batch_size": 8}
        )
        for number in (2, 0, 1, 3)
    ]
    other = Member("table1", "a", "validation", make_run(0).spec)
    with Store(path) as store:
        store.save_recipe("smoke", "text", members[:1])
        store.save_recipe("table1", "other", [other])
        store.save_recipe("smoke", "new", members)
        assert store.recipes() == {"smoke": "new", "table1": "other"}
        assert store.members("smoke") == members
        assert store.members("table1") == [other]
        with pytest.raises(ValueError, match="did you mean smoke"):
            store.members("smok")
        with pytest.raises(ValueError, match="table1 cannot be stored under smoke"):
            store.save_recipe("smoke", "", [other])


def test_figures_are_kept_and_replaced(path: Path) -> None:
    with Store(path) as store:
        store.put_figure("slice", "smoke", {"sites": [1, 2]}, b"old")
        store.put_figure("slice", "smoke", {"sites": [1, 3]}, bytes(range(256)))
        store.put_figure("slice", "other", {}, b"")
        assert store.figures("smoke") == [Figure("slice", "smoke", {"sites": [1, 3]}, bytes(range(256)))]
        assert store.figures("none") == []


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((make_row(), make_row(bins=10)), "same confidence bins"),
        ((make_row(domain=1),), "domain 1"),
        ((replace(make_row(), metrics={"n": 4}),), "expected the keys"),
        ((replace(make_row(), metrics={**make_row().metrics, "n": 5}),), "not the sum"),
    ],
)
def test_what_could_not_be_read_back_is_refused(path: Path, rows: tuple[Row, ...], message: str) -> None:
    with Store(path) as store:
        with pytest.raises(ValueError, match=message):
            store.add(make_run(rows=rows))
        assert store.done() == set()


def test_a_run_without_batches_is_refused(path: Path) -> None:
    with Store(path) as store, pytest.raises(ValueError, match="without batches"):
        store.add(replace(make_run(), record=Record(())))


def test_readers_change_nothing_and_see_what_writers_add(path: Path) -> None:
    with Store(path) as writer, Store(path, readonly=True) as reader:
        writer.add(make_run(0))
        assert len(reader.done()) == 1
        with pytest.raises(StoreError, match="for reading only"):
            reader.add(make_run(1))
        writer.add(make_run(1))
        assert len(reader.done()) == 2
    content = path.read_bytes()
    with Store(path, readonly=True) as reader:
        reader.load(reader.done())
    assert path.read_bytes() == content
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_threads_may_share_a_store(path: Path) -> None:
    with Store(path) as store:
        threads = [
            threading.Thread(target=lambda first=first: [store.add(make_run(first + at)) for at in range(20)])
            for first in (0, 10, 20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.done() == {make_run(seed).spec.key for seed in range(40)}


def test_other_programs_can_read_it(path: Path) -> None:
    run = make_run(7)
    with Store(path) as store:
        store.add(run)
    db = sqlite3.connect(path)
    query = (
        "SELECT method, checkpoint, data, domain, seed, batch_size, seconds FROM runs WHERE method = 'tent'"
    )
    assert db.execute(query).fetchall() == [("tent", "digits-sla", "digits", "fog 5", 7, 64, 12.25)]
    assert db.execute("SELECT sum(correct), sum(n) FROM batches").fetchone() == (0 + 1 + 2, 12)
    (blob,) = db.execute("SELECT bins FROM batches WHERE number = 2").fetchone()
    metrics = run.record.rows[2].metrics
    expected = [metrics["bin_count"], metrics["bin_confidence"], metrics["bin_correct"]]
    assert np.frombuffer(blob, "<f8").reshape(3, 15).tolist() == expected
    db.close()


def test_many_runs_are_read_in_bulk(path: Path) -> None:
    count, rows = 100, tuple(make_row(number % 5) for number in range(157))
    with Store(path) as store:
        for seed in range(count):
            store.add(make_run(seed, rows=rows))
        start = time.process_time()
        assert len(store.load(store.done())) == count
        assert time.process_time() - start < 1.0  # about 0.1 s; 1,000 runs in a few seconds is the promise


def test_paths_that_cannot_hold_a_store(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a folder; give the name of a file"):
        Store(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere; make it first"):
        Store(tmp_path / "nowhere" / "runs.db")
    for options in ({"create": False}, {"readonly": True}):
        with pytest.raises(FileNotFoundError, match="there is no store"):
            Store(tmp_path / "runs.db", **options)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_becomes_a_store_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "runs # 100%?.db"  # a name that must not be taken for a part of an address
    path.touch()
    for options in ({"create": False}, {"readonly": True}):
        with pytest.raises(FileNotFoundError, match="is empty"):
            Store(path, **options)
    assert path.stat().st_size == 0
    with Store(path) as store:
        assert store.add(make_run())
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
