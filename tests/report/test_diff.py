"""What changed between two stores."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from tests.helpers.report import BASIC, FIXED, FakeStore, fake_run
from ttvd.bench.packed import PackedRuns, pack_runs, unpack_runs
from ttvd.bench.run import Record, Row
from ttvd.bench.spec import Domain, Run
from ttvd.bench.store import Store
from ttvd.report.diff import compare_runs, have_same_rows, make_diff_page
from ttvd.report.document import Table
from ttvd.report.html import render_html


def make_store(text: str = FIXED, name: str = "basic") -> FakeStore:
    return FakeStore((name, text), batches=4)


def compare(now: FakeStore, before: FakeStore) -> dict[str, Table]:
    page = make_diff_page(cast(Store, now), cast(Store, before), ("now.db", "before.db"))
    assert "<h1>What changed: now.db against before.db</h1>" in render_html(page)
    return {table.name: table for table in page.tables()}


def test_equal_stores_have_no_differences() -> None:
    now, before = make_store(), make_store()
    page = make_diff_page(cast(Store, now), cast(Store, before), ("a", "b"))
    assert page.tables() == []
    assert page.notices[0].good
    assert [number for number, _ in page.highlights] == ["0", "0", "0", "24"]
    html = render_html(page)
    assert "4 of 4 lines and 12 of 12 cells" in html


def test_times_alone_are_no_difference() -> None:
    run = next(iter(make_store().runs.values()))
    rows = tuple(replace(row, seconds=9.0) for row in run.record.rows)
    later = replace(run, record=replace(run.record, rows=rows), facts=replace(run.facts, started=1.0))
    assert have_same_rows(run, later)
    assert not have_same_rows(run, replace(run, record=replace(run.record, rows=rows[:-1])))


def test_other_rows_are_listed_with_sign_and_size() -> None:
    now, before = make_store(), make_store()
    key, run = next((key, run) for key, run in now.runs.items() if run.spec.method == "tent")
    worse = fake_run(run.spec, 4, shift=0.3)
    now.runs[key] = replace(
        worse, facts=replace(worse.facts, versions={**worse.facts.versions, "torch": "9"})
    )
    tables = compare(now, before)
    (row,) = tables["changed-runs"].rows
    change = 100 * (worse.totals["error"] - run.totals["error"])
    assert (row[0].text, row[6].text, row[6].tone) == (key, f"{change:+.2f}", "worse")
    assert "torch 2.13.0" in row[10].text
    assert "→" in row[10].text
    assert row[11].text == "the same"
    (cell,) = tables["basic-cells"].rows
    assert [c.text for c in cell[:3]] == ["tent", "last", run.spec.domain_label]
    assert cell[5].value == pytest.approx(change / 2)  # one of two seeds
    (line,) = tables["basic-lines"].rows
    assert line[5].value == pytest.approx(change / 6)
    assert float(line[6].value) < change / 6


def test_new_and_removed_runs_are_counted_by_method() -> None:
    now, before = (
        make_store(),
        make_store(FIXED.replace('"bn", ', "").replace("seeds = [0, 1]", "seeds = [1, 2]")),
    )
    found = compare_runs(cast(Store, now), cast(Store, before))
    assert (len(found.new), len(found.removed), len(found.changed), found.equal) == (15, 9, 0, 9)
    tables = compare(now, before)
    counts = {row[0].text: (row[3].value, row[4].value) for row in tables["new-and-removed"].rows}
    assert counts == {"bn": (6, 0), "source": (3, 3), "tent": (3, 3), "ttvd": (3, 3)}
    html = render_html(make_diff_page(cast(Store, now), cast(Store, before), ("a", "b")))
    assert "New lines: bn." in html
    assert "The recipe changed" in html
    assert "-seeds = [1, 2]" in html


def test_columns_of_one_store_only_are_named() -> None:
    before = make_store(FIXED.replace('"fog", ', '"snow", '))
    html = render_html(make_diff_page(cast(Store, make_store()), cast(Store, before), ("a", "b")))
    assert "New columns: fog 5." in html
    assert "Removed columns: snow 5." in html


def test_another_chosen_setting_is_told() -> None:
    now, before = make_store(BASIC), make_store(BASIC)
    chosen = next(
        line for line in before.study("basic").lines if (line.label, line.rule) == ("tent", "validation")
    )
    for key, run in list(now.runs.items()):
        if run.spec.method == "tent" and run.spec.parameters["lr"] == chosen.parameters["lr"]:
            now.runs[key] = fake_run(run.spec, 4, shift=0.4)
    rows = [row for row in compare(now, before)["basic-lines"].rows if row[0].text == "tent"]
    assert {row[2].text for row in rows} == {f"lr {chosen.parameters['lr']:g}"}
    assert all(row[1].note != row[2].text for row in rows)


def test_recipes_of_one_store_only_are_named() -> None:
    page = make_diff_page(
        cast(Store, make_store(name="one")), cast(Store, make_store(name="two")), ("a", "b")
    )
    assert page.notices[0].text == "Recipes only in a: one; only in b: two."
    assert [section.title for section in page.sections] == ["Runs"]


def test_another_fixed_parameter_is_told() -> None:
    now = make_store(FIXED + '[[methods]]\nname = "tent"\nlabel = "mine"\nparams = { lr = 0.5 }\n')
    before = make_store(FIXED + '[[methods]]\nname = "tent"\nlabel = "mine"\nparams = { lr = 0.25 }\n')
    row = next(row for row in compare(now, before)["basic-lines"].rows if row[0].text == "mine")
    assert row[1].note == "lr 0.5"
    assert row[2].text == "lr 0.25"


def test_a_store_that_was_packed_and_unpacked_is_the_same(tmp_path: Path) -> None:
    fake = make_store()
    packed = PackedRuns(pack_runs(cast(Store, fake), "basic", tmp_path)[0])
    with Store(tmp_path / "new.db") as store:
        unpack_runs(packed, store)
        for one, other in ((store, fake), (fake, store), (packed, fake), (packed, store), (store, store)):
            found = compare_runs(cast(Store, one), cast(Store, other))
            assert (found.equal, len(found.changed)) == (len(fake.runs), 0)
        key, run = next((key, run) for key, run in fake.runs.items() if run.spec.method == "tent")
        fake.runs[key] = fake_run(run.spec, 4, shift=0.3)
        for reader in (store, packed):
            found = compare_runs(cast(Store, fake), reader)
            assert [now.spec.key for now, _ in found.changed] == [key]


def collapse(run: Run) -> Run:
    """As it comes out of a store that it was unpacked into: one row for each domain."""
    rows = []
    for number in range(len(run.spec.domains)):
        mine = [row for row in run.record.rows if row.domain == number]
        state = {name: sum_up([row.metrics[name] for row in mine]) for name in mine[0].metrics}
        n = sum(cast(int, row.metrics["n"]) for row in mine)
        kept = sum(cast(int, row.metrics["n"]) * row.kept for row in mine) / n
        rows.append(Row(state, kept, 1.0, number))
    return replace(run, record=Record(tuple(rows)))


def sum_up(values: list[float | list[float]]) -> float | list[float]:
    if isinstance(values[0], list):
        return [sum(column) for column in zip(*cast(list[list[float]], values), strict=True)]
    return sum(cast(list[float], values))


def test_sums_of_domains_are_compared_one_by_one() -> None:
    first = next(iter(make_store().runs.values()))
    spec = replace(first.spec, domains=(Domain("fog"), Domain("snow")))
    rows = [
        replace(row, domain=number % 2) for number, row in enumerate(fake_run(first.spec, 40).record.rows)
    ]
    run = replace(first, spec=spec, record=Record(tuple(rows)))
    assert have_same_rows(run, collapse(run))
    assert have_same_rows(collapse(run), collapse(run))
    swapped = replace(run, record=Record(tuple(replace(row, domain=1 - row.domain) for row in rows)))
    assert swapped.totals["error"] == run.totals["error"]
    assert not have_same_rows(swapped, collapse(run))
    lost = replace(run, record=Record(tuple(replace(row, kept=0.25) for row in rows)))
    assert not have_same_rows(lost, collapse(run))


def test_packed_counts_of_batches_are_compared_too(tmp_path: Path) -> None:
    fake = make_store()
    packed = PackedRuns(pack_runs(cast(Store, fake), "basic", tmp_path)[0])
    key, run = next((key, run) for key, run in fake.runs.items() if run.spec.method == "tent")
    fake.runs[key] = replace(run, record=Record(run.record.rows[::-1]))  # the same sums in another order
    assert not have_same_rows(fake.runs[key], packed.load([key])[key])
