"""The numbers of a study, against sums by hand."""

from statistics import fmean, stdev

import pytest

from tests.report.fakes import BASIC, FakeStore, fake_study
from ttvd.bench.study import Line
from ttvd.report.results import Results, is_honest, show_rule

CONDITIONS = BASIC.replace('rules = ["grid-best", "validation"]', "").replace(
    "[grid]\nlr = [0.001, 0.0005]", "[stream]\nbatch_size = [16, 8]"
)


@pytest.fixture(scope="module")
def results() -> Results:
    return Results(fake_study())


def pick(results: Results, label: str, rule: str) -> Line:
    return next(line for line in results.lines if (line.label, line.rule) == (label, rule))


def test_columns_come_in_the_order_of_the_published_tables(results: Results) -> None:
    assert [column.domain for column in results.columns] == ["gaussian noise 5", "fog 5", "contrast 5"]


def test_lines_without_labels_come_first_and_oracles_last() -> None:
    study = fake_study(BASIC.replace('["grid-best", "validation"]', '["oracle", "grid-best", "validation"]'))
    rules = [line.rule for line in Results(study).lines]
    assert rules == ["last", "last", "validation", "validation", "grid-best", "grid-best", "oracle", "oracle"]


def test_means_and_spreads_are_those_of_the_runs(results: Results) -> None:
    line = pick(results, "tent", "validation")
    errors = [
        [
            run.totals["error"]
            for column in results.columns
            for run in line.runs[column]
            if run.spec.seed == seed
        ]
        for seed in (0, 1)
    ]
    value = results.value(line, results.columns, "error")
    assert value is not None
    assert value.mean == pytest.approx(fmean(map(fmean, errors)))
    assert value.spread == pytest.approx(stdev(map(fmean, errors)))
    assert value.whole


def test_a_missing_run_is_seen() -> None:
    store = FakeStore(("basic", BASIC))
    lost = next(m.spec for m in store.members("basic") if m.label == "source" and m.spec.seed == 1)
    store.lose(lost.key)
    results = Results(store.study("basic"))
    line = pick(results, "source", "last")
    column = next(column for column in results.columns if column.domain == lost.domain_label)
    value = results.value(line, [column], "error")
    assert value is not None
    assert (value.spread, value.whole) == (None, False)
    assert line.pending == 1
    others = [other for other in results.columns if other != column]
    whole = results.value(line, others, "error")
    assert whole is not None
    assert whole.whole


def test_a_column_without_runs_has_no_value() -> None:
    store = FakeStore(("basic", BASIC))
    store.lose(*{m.spec.key for m in store.members("basic") if m.label == "bn"})
    results = Results(store.study("basic"))
    line = pick(results, "bn", "last")
    assert results.value(line, results.columns, "error") is None
    assert (results.milliseconds(line), results.kept(line), results.reliability(line)) == (None, None, None)


def test_conditions_group_the_columns() -> None:
    results = Results(fake_study(CONDITIONS))
    found = results.conditions()
    assert list(found) == ["batch size 16", "batch size 8"]
    assert [[column.domain for column in columns] for columns in found.values()] == [
        ["gaussian noise 5", "fog 5", "contrast 5"]
    ] * 2


def test_time_is_for_each_image(results: Results) -> None:
    line = pick(results, "bn", "last")
    run = results.runs(line)[0]
    times = sorted(row.seconds for row in run.record.rows[1:])
    single = 1000 * times[len(times) // 2] / 64
    assert results.milliseconds(line) == pytest.approx(single, rel=0.1)


def test_what_is_kept_is_told_only_of_lines_that_learn(results: Results) -> None:
    assert results.kept(pick(results, "bn", "last")) is None
    assert results.kept(pick(results, "tent", "validation")) is not None


def test_reliability_counts_every_prediction(results: Results) -> None:
    line = pick(results, "ttvd", "validation")
    reliability = results.reliability(line)
    assert reliability is not None
    assert int(reliability.count.sum()) == 3 * 2 * 8 * 64


def test_the_reference_is_that_of_the_same_rule(results: Results) -> None:
    tent, ttvd = pick(results, "tent", "grid-best"), pick(results, "ttvd", "grid-best")
    assert results.reference(tent) is ttvd
    assert results.reference(ttvd) is None
    assert results.reference(pick(results, "ttvd", "validation")) is None
    source = results.reference(tent, "source")
    assert source is not None
    assert source.rule == "last"


def test_names_tell_lines_apart(results: Results) -> None:
    names = [results.name(line) for line in results.lines]
    assert len(set(names)) == len(names)
    assert "source" in names
    assert "tent (validation)" in names


def test_rules_say_how_many_settings_were_tried(results: Results) -> None:
    assert show_rule(pick(results, "tent", "grid-best")) == "grid-best of 2"
    assert show_rule(pick(results, "source", "last")) == "last"
    assert [is_honest(line) for line in results.lines] == [True] * 4 + [False] * 2
