"""Tables of a study and paired comparisons."""

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.report import BASIC, CONDITIONS, FIXED, FakeStore, fake_run, fake_study, pick
from ttvd.bench.compare import paired_difference
from ttvd.bench.run import Record, sum_metrics
from ttvd.bench.spec import Domain
from ttvd.bench.study import Column, Study
from ttvd.report.document import Cell, Table
from ttvd.report.results import ECE, ERROR, Results
from ttvd.report.tables import (
    DRAWS,
    compare_lines,
    comparison_table,
    condition_table,
    continual_table,
    domain_table,
    overview_table,
    pair_records,
    summary_table,
)

ORACLE = BASIC.replace('["grid-best", "validation"]', '["grid-best", "validation", "oracle"]')


@pytest.fixture(scope="module")
def results() -> Results:
    return Results(fake_study(ORACLE))


def texts(table: Table, column: int) -> list[str]:
    return [row[column].text for row in table.rows]


def numbers(table: Table, column: int) -> list[float]:
    return [float(row[column].value) for row in table.rows]


def test_every_line_shows_its_rule_and_setting(results: Results) -> None:
    for table in (summary_table(results), domain_table(results, results.columns, ERROR, "x")):
        for row, line in zip(table.rows, results.lines, strict=True):
            assert row[0].text == line.label
            assert row[1].text.startswith(line.rule)
            if line.tried > 1:
                assert row[1].text.endswith("of 2")
                assert row[1].note == f"lr {line.parameters['lr']:g}"
        assert list(table.tags) == [line.rule for line in results.lines]


def test_the_columns_are_those_of_the_published_tables(results: Results) -> None:
    table = domain_table(results, results.columns, ERROR, "x")
    assert [heading.text for heading in table.full_headings()] == [
        "method",
        "chosen by",
        "gaussian",
        "fog",
        "contrast",
        "mean",
    ]
    assert list(table.spans) == [("", 2), ("noise", 1), ("weather", 1), ("digital", 1), ("", 1)]


def test_cells_are_means_and_spreads_in_per_cent(results: Results) -> None:
    table = domain_table(results, results.columns, ERROR, "x")
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
    table = domain_table(results, results.columns, ERROR, "x")
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
    table = domain_table(results, results.columns, ERROR, "x")
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
    assert [heading.text for heading in table.full_headings()][2:] == ["batch size 16", "batch size 8"]
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
    table = continual_table(results, column)
    assert table is not None
    assert [heading.text for heading in table.full_headings()][2:] == ["fog 5", "contrast 5"]
    rows = lines[0].runs[column][0].record.rows
    right = [sum_metrics(rows[2 * k : 2 * k + 2]).state()["correct"] for k in (0, 1)]
    expected = [100 * (1 - float(str(count)) / 128) for count in right]
    assert [cell.value for cell in table.rows[0][2:]] == pytest.approx(expected)
    assert continual_table(Results(study), study.columns[0]) is None


def test_a_zero_is_a_number() -> None:
    assert Table(["a"], [[Cell("0", 0.0)]]).text_columns() == [False]


@pytest.fixture(scope="module")
def study() -> Study:
    return fake_study(FIXED)


def test_each_line_but_the_reference_has_a_duel(study: Study) -> None:
    results = Results(study)
    comparisons = compare_lines(results)
    assert [comparison.line.label for comparison in comparisons] == ["source", "bn", "tent"]
    assert {comparison.reference.label for comparison in comparisons} == {"ttvd"}
    assert [comparison.line.label for comparison in compare_lines(results, "bn")] == [
        "source",
        "tent",
        "ttvd",
    ]


def test_the_total_is_the_paired_difference_over_all_columns(study: Study) -> None:
    results = Results(study)
    comparison = compare_lines(results)[1]
    ours = [run.record for run in results.runs(comparison.line)]
    theirs = [run.record for run in results.runs(comparison.reference)]
    assert comparison.total == paired_difference(ours, theirs, draws=DRAWS)
    assert comparison.unpaired == 0


def test_verdicts_are_those_of_the_columns(study: Study) -> None:
    results = Results(study)
    comparison = compare_lines(results)[0]
    assert comparison.verdicts == ("worse",) * 3
    row = comparison_table(results, [comparison]).rows[0]
    assert [cell.text for cell in row[5:]] == ["0", "0", "3"]
    assert row[4].note == "more errors"
    assert row[3].text.startswith("+")


def test_equal_lines_tie(study: Study) -> None:
    results = Results(study)
    line = pick(results, "ttvd", "last")
    twin = replace(line, label="twin")
    (comparison, *_) = compare_lines(Results(replace(study, lines=(twin, line))))
    assert comparison.verdicts == ("tie",) * 3
    assert comparison.total is not None
    assert (comparison.total.difference, comparison.total.verdict) == (0.0, "tie")


def test_other_streams_are_not_compared(study: Study) -> None:
    results = Results(study)
    line = pick(results, "bn", "last")
    column = study.columns[0]
    moved = tuple(replace(run, facts=replace(run.facts, order="f" * 16)) for run in line.runs[column])
    other = replace(line, runs={**line.runs, column: moved})
    lines = tuple(other if one is line else one for one in study.lines)
    comparison = next(d for d in compare_lines(Results(replace(study, lines=lines))) if d.line is other)
    assert len(comparison.verdicts) == 2
    assert comparison.unpaired == 2


def test_a_stream_that_was_cut_shorter_is_another_stream(study: Study) -> None:
    run = next(iter(study.lines[0].runs.values()))[0]
    short = replace(run, record=fake_run(run.spec, 5).record)
    assert pair_records([run], [short]) == ([], [])


def test_without_a_common_stream_there_is_no_number(study: Study) -> None:
    results = Results(study)
    line, reference = pick(results, "bn", "last"), pick(results, "ttvd", "last")
    empty = replace(line, runs={})
    (comparison,) = compare_lines(Results(replace(study, lines=(empty, reference))))
    assert comparison.total is None
    row = comparison_table(Results(replace(study, lines=(empty, reference))), [comparison]).rows[0]
    assert [cell.value for cell in row[3:5]] == ["", ""]


def test_an_unknown_reference_is_refused(study: Study) -> None:
    with pytest.raises(ValueError, match="no line is called 'tnet'; there are: bn, source, tent, ttvd"):
        compare_lines(Results(study), "tnet")
