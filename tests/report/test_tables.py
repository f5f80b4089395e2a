"""Tables of a study: what is marked as best, what is missing, and that the rule always stands there."""

from dataclasses import replace

import numpy as np
import pytest

from tests.report.fakes import BASIC, FakeStore, fake_run, fake_study
from tests.report.test_results import CONDITIONS, pick
from ttvd.bench.run import Record, sum_metrics
from ttvd.bench.spec import Domain
from ttvd.bench.study import Column, Study
from ttvd.report.page import Cell, Table
from ttvd.report.results import ECE, ERROR, Results
from ttvd.report.tables import column_table, condition_table, journey_table, overview_table, summary_table

ORACLE = BASIC.replace('["grid-best", "validation"]', '["grid-best", "validation", "oracle"]')


@pytest.fixture(scope="module")
def results() -> Results:
    return Results(fake_study(ORACLE))


def texts(table: Table, column: int) -> list[str]:
    return [row[column].text for row in table.rows]


def numbers(table: Table, column: int) -> list[float]:
    return [float(row[column].value) for row in table.rows]


def test_every_line_shows_its_rule_and_setting(results: Results) -> None:
    for table in (summary_table(results), column_table(results, results.columns, ERROR, "x")):
        for row, line in zip(table.rows, results.lines, strict=True):
            assert row[0].text == line.label
            assert row[1].text.startswith(line.rule)
            if line.tried > 1:
                assert row[1].text.endswith("of 2")
                assert row[1].note == f"lr {line.parameters['lr']:g}"
        assert list(table.tags) == [line.rule for line in results.lines]


def test_the_columns_are_those_of_the_published_tables(results: Results) -> None:
    table = column_table(results, results.columns, ERROR, "x")
    assert [heading.text for heading in table.titles()] == [
        "method",
        "chosen by",
        "gaussian",
        "fog",
        "contrast",
        "mean",
    ]
    assert list(table.spans) == [("", 2), ("noise", 1), ("weather", 1), ("digital", 1), ("", 1)]


def test_cells_are_means_and_spreads_in_per_cent(results: Results) -> None:
    table = column_table(results, results.columns, ERROR, "x")
    line = results.lines[0]
    errors = [run.totals["error"] for run in line.runs[results.columns[0]]]
    cell = table.rows[0][2]
    assert cell.text == f"{100 * np.mean(errors):.1f}"
    assert cell.note == f"±{100 * np.std(errors, ddof=1):.1f}"
    assert cell.value == pytest.approx(100 * np.mean(errors))
    assert cell.link == "#s1-l1-c2"


def test_bold_is_the_lowest_but_never_an_oracle(results: Results) -> None:
    table = summary_table(results)
    for column in range(2, 7):
        cells = [row[column] for row in table.rows]
        fair = [cell for cell, line in zip(cells, results.lines, strict=True) if line.rule != "oracle"]
        lowest = min(float(cell.text) for cell in fair)
        assert [cell.best for cell in fair] == [float(cell.text) == lowest for cell in fair]
        assert not any(cell.best or cell.marked for cell in cells if cell not in fair)
    oracle = results.lines.index(pick(results, "ttvd", "oracle"))
    assert numbers(table, 2)[oracle] == min(numbers(table, 2))


def test_underlined_is_the_lowest_of_those_that_saw_no_labels(results: Results) -> None:
    table = column_table(results, results.columns, ERROR, "x")
    for column in range(2, 6):
        honest = [row[column] for row in table.rows[:4]]
        lowest = min(float(cell.text) for cell in honest)
        assert all(cell.best or cell.marked for cell in honest if float(cell.text) == lowest)
        assert not any(row[column].marked for row in table.rows[4:])


def test_missing_runs_leave_a_dagger_and_no_crown() -> None:
    store = FakeStore(("basic", BASIC))
    keys = [m.spec.key for m in store.members("basic") if m.label == "ttvd" and m.role == "test"]
    column = store.runs[keys[0]].spec.domain_label
    store.lose(
        *[
            key
            for key in keys
            if store.runs[key].spec.domain_label == column and store.runs[key].spec.seed == 1
        ]
    )
    results = Results(store.study("basic"))
    table = column_table(results, results.columns, ERROR, "x")
    place = 2 + [c.domain for c in results.columns].index(column)
    row = next(row for row, line in zip(table.rows, results.lines, strict=True) if line.label == "ttvd")
    assert row[place].text.endswith("†")
    assert not row[place].best
    assert "missing †" in row[0].note
    best = [row[place].text for row in table.rows if row[place].best]
    assert len(set(best)) == 1  # of those that tie, all


def test_a_line_without_runs_is_listed_and_sorted_last() -> None:
    store = FakeStore(("basic", BASIC))
    store.lose(*{m.spec.key for m in store.members("basic") if m.label == "bn"})
    table = summary_table(Results(store.study("basic")))
    row = next(row for row in table.rows if row[0].text == "bn")
    assert [(cell.text, cell.value) for cell in row[2:]] == [("-", "")] * 7


def test_one_seed_has_no_spread() -> None:
    results = Results(fake_study(BASIC.replace("seeds = [0, 1]", "seeds = [3]")))
    assert {row[2].note for row in summary_table(results).rows} == {""}


def test_conditions_make_the_columns() -> None:
    results = Results(fake_study(CONDITIONS))
    table = condition_table(results, ECE)
    assert [heading.text for heading in table.titles()][2:] == ["batch size 16", "batch size 8"]
    line, columns = results.lines[1], list(results.conditions().values())
    expected = [100 * (line.mean("ece", group) or 0.0) for group in columns]
    assert [cell.value for cell in table.rows[1][2:]] == pytest.approx(expected)


def test_studies_stand_side_by_side() -> None:
    other = (
        BASIC.replace("Digits under noise and blur", "Few")
        .replace('"bn", ', "")
        .replace("[0.001, 0.0005]", "[0.1]")
    )
    several = [Results(fake_study()), Results(fake_study(other, "few"), 2)]
    table = overview_table(several)
    assert list(table.spans) == [("", 2), ("Digits under noise and blur", 3), ("Few", 3)]
    bn = next(row for row in table.rows if row[0].text == "bn")
    assert [cell.value == "" for cell in bn[2:]] == [False] * 3 + [True] * 3
    assert table.rows[0][5].link == "#s2-l1"
    notes = {(row[0].text, row[1].text): row[1].note for row in table.rows}
    assert notes["source", "last"] == "one fixed setting"
    chosen = pick(several[0], "tent", "grid-best").parameters["lr"]
    assert notes["tent", "grid-best of 2 / grid-best"] == f"lr {chosen:g} / lr 0.1"


def test_a_stream_of_several_domains_is_told_domain_by_domain() -> None:
    study = fake_study()
    domains = (Domain("fog"), Domain("contrast"))
    column = Column("continual (2)")
    lines = []
    for line in study.lines[:2]:
        spec = replace(line.runs[study.columns[0]][0].spec, domains=domains)
        rows = fake_run(spec, 4).record.rows
        record = Record(tuple(replace(row, domain=number // 2) for number, row in enumerate(rows)))
        lines.append(
            replace(line, runs={column: (replace(line.runs[study.columns[0]][0], spec=spec, record=record),)})
        )
    results = Results(Study(study.recipe, (column,), tuple(lines), 0, 0))
    table = journey_table(results, column)
    assert table is not None
    assert [heading.text for heading in table.titles()][2:] == ["fog 5", "contrast 5"]
    rows = lines[0].runs[column][0].record.rows
    right = [sum_metrics(rows[2 * k : 2 * k + 2]).state()["correct"] for k in (0, 1)]
    expected = [100 * (1 - float(str(count)) / 128) for count in right]
    assert [cell.value for cell in table.rows[0][2:]] == pytest.approx(expected)
    assert journey_table(Results(study), study.columns[0]) is None


def test_a_zero_is_a_number() -> None:
    assert Table(["a"], [[Cell("0", 0.0)]]).wordy() == [False]
