"""The page of a store, and the numbers behind it."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, stdev
from typing import cast

import pytest

from tests.helpers.report import BASIC, CONDITIONS, FIXED, FakeStore, fake_study, pick
from ttvd.bench.packed import PackedRuns, pack_runs
from ttvd.bench.store import Figure, Store
from ttvd.report.document import Document
from ttvd.report.html import render_html, write_report
from ttvd.report.provenance import list_overrides
from ttvd.report.results import GLOSSARY, Results, chosen_without_labels, format_rule
from ttvd.report.study import add_caption, make_page
from ttvd.report.study_figures import show_comparisons
from ttvd.report.tables import compare_lines, summary_table

METHODS = {"tent": "Minimises <entropy>.", "lame": "not here"}


class Reader(HTMLParser):
    """Collects what a page defines and what it refers to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.outside: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        for name in ("src", "href", "srcset", "action"):
            target = values.get(name) or ""
            (self.links if target.startswith("#") else self.outside).append(target)
        self.outside = [target for target in self.outside if target]


def make_store() -> FakeStore:
    store = FakeStore(("basic", BASIC), ("sizes", CONDITIONS.replace("noise and blur", "small batches")))
    keys = [m.spec.key for m in store.members("basic") if m.label == "tent" and m.role == "test"]
    store.break_run(keys[0], "Traceback\n  ...\nRuntimeError: <out of memory>\n")
    store.lose(keys[1])
    return store


@pytest.fixture(scope="module")
def store() -> FakeStore:
    return make_store()


@pytest.fixture(scope="module")
def page(store: FakeStore) -> Document:
    return make_page(cast(Store, store), methods=METHODS)


@pytest.fixture(scope="module")
def html(page: Document) -> str:
    return render_html(page)


def test_the_page_stands_alone(html: str) -> None:
    reader = Reader(html)
    assert all(target.startswith("data:") for target in reader.outside)
    assert "http" not in re.sub(r'"data:[^"]*"', "", html)
    assert len(reader.ids) == len(set(reader.ids))
    assert set(reader.links) <= {f"#{name}" for name in reader.ids}
    assert len(html) < 4_000_000


def test_every_number_leads_to_its_runs(html: str, store: FakeStore) -> None:
    cells = re.findall(r"<td data-value=\"[^\"]+\"[^>]*>(.*?)</td>", html.partition('id="runs"')[0])
    numbers = [cell for cell in cells if re.match(r"[^<]*\d+\.\d|<u>", re.sub(r"<a[^>]*>", "", cell))]
    assert len(numbers) > 150
    assert all('href="#s' in cell for cell in numbers)
    for name in store.recipes():
        for line in store.study(name).lines:
            for runs in line.runs.values():
                for run in runs:
                    assert run.spec.key in html
                    assert run.facts.order in html


def test_provenance_names_versions_device_data_and_setting(html: str) -> None:
    told = html.partition('id="runs"')[2]
    for text in (
        "torch 2.13.0",
        "AMD EPYC",
        "generated with CIFAR-10-C&#39;s constants",
        "digits-sla (weights 7f3a9c1d2b4e6f80)",
        "lr 0.0005",
        "iid, batches of 64",
        "2026-09-21",
    ):
        assert text in told


def test_failures_and_gaps_are_told(html: str) -> None:
    assert "Not complete: 1 failed run, 1 run not done" in html
    gaps = html.partition('id="gaps"')[2].partition("<section")[0]
    assert "RuntimeError: &lt;out of memory&gt;" in gaps
    assert "tent on" in gaps
    assert "1 failed, 1 not done" in gaps
    assert "†" in html


def test_both_calibration_errors_are_told_apart(html: str) -> None:
    assert "as some papers report it" in html
    assert "It is too high for small batches" in html


def test_rules_and_methods_are_explained(html: str) -> None:
    words = html.partition('id="glossary"')[2].partition("<section")[0]
    for text in ("used the test labels", "this can be deployed", "Minimises &lt;entropy&gt;."):
        assert text in words
    assert "not here" not in words
    assert "oracle" not in words


def test_the_recipes_are_on_the_page(html: str) -> None:
    assert "[[methods]]" in html
    assert "ttvd bench basic.toml --store runs.db" in html


def test_each_study_has_its_figures(html: str) -> None:
    assert html.count("<figure>") == 2 * 5
    assert html.count('alt=""') == 0


def test_a_complete_store_says_so() -> None:
    store = FakeStore(("sizes", CONDITIONS), batches=3)
    page = make_page(cast(Store, store))
    assert [notice.good for notice in page.notices] == [True]
    assert page.title == "Digits under noise and blur"
    assert [section.title for section in page.sections] == [
        "Results",
        "Failures and missing runs",
        "Glossary",
        "Provenance of the numbers",
    ]
    assert page.tags == []


def test_a_store_whose_runs_are_all_to_come_still_has_a_page() -> None:
    store = FakeStore(("basic", BASIC))
    store.lose(*list(store.runs))
    html = render_html(make_page(cast(Store, store)))
    assert "None of its runs is done yet." in html
    assert "runs not done" in html


def test_only_the_recipes_that_were_asked_for() -> None:
    store = make_store()
    page = make_page(cast(Store, store), ["sizes"])
    assert page.facts[1] == ("Recipes", "sizes")


def test_figures_that_cannot_be_drawn_are_named() -> None:
    store = FakeStore(("sizes", CONDITIONS + '[[figures]]\nkind = "hologram"\n'), batches=3)
    store.pictures = [Figure("01-hologram", "sizes", {"kind": "hologram"}, b"")]
    html = render_html(make_page(cast(Store, store)))
    assert "The figure 01-hologram of the store cannot be drawn" in html
    assert "hologram" in html


def test_bad_questions_are_refused() -> None:
    empty = FakeStore()
    with pytest.raises(ValueError, match="holds no recipe"):
        make_page(cast(Store, empty))
    store = FakeStore(("sizes", CONDITIONS), batches=3)
    with pytest.raises(ValueError, match="no line is called 'tnet'"):
        make_page(cast(Store, store), reference="tnet")
    with pytest.raises(ValueError, match="no recipe 'size'"):
        make_page(cast(Store, store), ["size"])


def test_tables_are_written_beside_the_page(page: Document, tmp_path: Path) -> None:
    first, *others = write_report(page, tmp_path / "new" / "folder")
    assert first == tmp_path / "new" / "folder" / "index.html"
    names = {path.stem for path in others}
    assert names == {table.name for table in page.tables()}
    assert {"basic-summary", "basic-error", "basic-ece", "basic-paired", "sizes-conditions-error"} <= names
    assert {path.suffix for path in others} == {".csv", ".md", ".tex"}
    assert all(path.stat().st_size > 0 for path in others)


def test_the_same_store_gives_the_same_page() -> None:
    first, second = (
        render_html(make_page(cast(Store, FakeStore(("sizes", CONDITIONS), batches=3)))) for _ in "ab"
    )
    assert first == second


def test_a_failure_of_packed_runs_has_no_time(tmp_path: Path) -> None:
    fake = FakeStore(("basic", FIXED), batches=2)
    fake.break_run(next(iter(fake.runs)), "Traceback: it broke")
    packed = PackedRuns(pack_runs(cast(Store, fake), "basic", tmp_path)[0])
    for store, told in ((cast(Store, fake), True), (packed, False)):
        text = render_html(make_page(store))
        gaps = text.partition('id="gaps"')[2].partition("</section>")[0]
        assert ("When" in gaps) == told
        assert "1970" not in gaps


def test_tables_stay_in_their_folder(tmp_path: Path) -> None:
    name = "../../../escaped"  # as a store of somebody else may call a recipe
    fake = FakeStore((name, BASIC), batches=2)
    with pytest.raises(ValueError, match="without folders"):
        write_report(make_page(cast(Store, fake)), tmp_path / "in" / "out")
    assert not list(tmp_path.iterdir())


def test_captions_say_over_how_many_seeds_a_spread_is() -> None:
    results = Results(FakeStore(("basic", BASIC)).study("basic"))
    caption = add_caption(summary_table(results), results.lines, "").caption
    assert "± is the standard deviation over 2 seeds." in caption


def test_captions_say_that_one_seed_has_no_spread() -> None:
    results = Results(FakeStore(("basic", BASIC.replace("[0, 1]", "[0]"))).study("basic"))
    caption = add_caption(summary_table(results), results.lines, "").caption
    assert "One seed, so there is no spread." in caption


def test_the_headline_is_of_a_line_that_saw_no_test_labels() -> None:
    store = FakeStore(("basic", BASIC))
    results = Results(store.study("basic"))
    honest = [100 * (results.error(line) or 0.0) for line in results.lines if chosen_without_labels(line)]
    page = make_page(cast(Store, store))
    assert page.highlights[1][0] == f"{min(honest):.1f} %"
    assert "chosen without test labels" in page.highlights[1][1]


@pytest.mark.parametrize(("batches", "too_few"), [(8, True), (40, False)])
def test_intervals_over_few_batches_are_called_too_narrow(batches: int, too_few: bool) -> None:
    results = Results(FakeStore(("basic", FIXED), batches=batches).study("basic"))
    figure = show_comparisons(results, compare_lines(results), results.lines)
    assert figure is not None
    assert (f"only {batches} batches" in figure.details) == too_few
    assert "not of others" in figure.details


def test_options_of_the_command_line_are_part_of_the_command() -> None:
    study = FakeStore(("basic", BASIC)).study("basic")
    assert list_overrides(Results(study)) == []
    recipe = study.recipe
    other = replace(recipe, seeds=(0, 1, 2), data=replace(recipe.data, limit=None))
    limit = {run.spec.limit for run in Results(study).all_runs()}.pop()
    expected = [f"--limit {limit}"] if limit else []
    assert list_overrides(Results(replace(study, recipe=other))) == [*expected, "--seeds 0,1"]


def test_a_reference_that_no_recipe_has_is_refused() -> None:
    store = FakeStore(("basic", BASIC), ("other", BASIC))
    with pytest.raises(ValueError, match="no line is called 'nobody'"):
        make_page(cast(Store, store), reference="nobody")


def test_a_seed_is_not_said_to_change_the_images() -> None:
    text = dict(GLOSSARY)["±"]
    assert "corrupted images stay the same" in text


@pytest.fixture(scope="module")
def results() -> Results:
    return Results(fake_study())


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
    assert value.complete


def test_a_missing_run_is_seen() -> None:
    store = FakeStore(("basic", BASIC))
    lost = next(m.spec for m in store.members("basic") if m.label == "source" and m.spec.seed == 1)
    store.lose(lost.key)
    results = Results(store.study("basic"))
    line = pick(results, "source", "last")
    column = next(column for column in results.columns if column.domain == lost.domain_label)
    value = results.value(line, [column], "error")
    assert value is not None
    assert (value.spread, value.complete) == (None, False)
    assert line.pending == 1
    others = [other for other in results.columns if other != column]
    whole = results.value(line, others, "error")
    assert whole is not None
    assert whole.complete


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
    assert format_rule(pick(results, "tent", "grid-best")) == "grid-best of 2"
    assert format_rule(pick(results, "source", "last")) == "last"
    assert [chosen_without_labels(line) for line in results.lines] == [True] * 4 + [False] * 2
