"""Who beats whom: only runs on the same streams are compared."""

from dataclasses import replace

import pytest

from tests.report.fakes import BASIC, fake_run, fake_study
from tests.report.test_results import pick
from ttvd.bench.compare import paired_difference
from ttvd.bench.study import Study
from ttvd.report.comparisons import DRAWS, duel_table, hold_duels, pair_records
from ttvd.report.results import Results

FIXED = BASIC.replace('rules = ["grid-best", "validation"]', "").replace("[grid]\nlr = [0.001, 0.0005]", "")


@pytest.fixture(scope="module")
def study() -> Study:
    return fake_study(FIXED)


def test_each_line_but_the_reference_has_a_duel(study: Study) -> None:
    results = Results(study)
    comparisons = hold_duels(results)
    assert [comparison.line.label for comparison in comparisons] == ["source", "bn", "tent"]
    assert {comparison.reference.label for comparison in comparisons} == {"ttvd"}
    assert [comparison.line.label for comparison in hold_duels(results, "bn")] == ["source", "tent", "ttvd"]


def test_the_total_is_the_paired_difference_over_all_columns(study: Study) -> None:
    results = Results(study)
    comparison = hold_duels(results)[1]
    ours = [run.record for run in results.runs(comparison.line)]
    theirs = [run.record for run in results.runs(comparison.reference)]
    assert comparison.total == paired_difference(ours, theirs, draws=DRAWS)
    assert comparison.unpaired == 0


def test_verdicts_are_those_of_the_columns(study: Study) -> None:
    results = Results(study)
    comparison = hold_duels(results)[0]
    assert comparison.verdicts == ("worse",) * 3
    row = duel_table(results, [comparison]).rows[0]
    assert [cell.text for cell in row[5:]] == ["0", "0", "3"]
    assert row[4].note == "more errors"
    assert row[3].text.startswith("+")


def test_equal_lines_tie(study: Study) -> None:
    results = Results(study)
    line = pick(results, "ttvd", "last")
    twin = replace(line, label="twin")
    (comparison, *_) = hold_duels(Results(replace(study, lines=(twin, line))))
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
    comparison = next(d for d in hold_duels(Results(replace(study, lines=lines))) if d.line is other)
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
    (comparison,) = hold_duels(Results(replace(study, lines=(empty, reference))))
    assert comparison.total is None
    row = duel_table(Results(replace(study, lines=(empty, reference))), [comparison]).rows[0]
    assert [cell.value for cell in row[3:5]] == ["", ""]


def test_an_unknown_reference_is_refused(study: Study) -> None:
    with pytest.raises(ValueError, match="no line is called 'tnet'; there are: bn, source, tent, ttvd"):
        hold_duels(Results(study), "tnet")
