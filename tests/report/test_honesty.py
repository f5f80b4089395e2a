"""What a page claims beside its numbers: seeds, images, intervals, headlines and the command behind them."""

from dataclasses import replace
from typing import cast

import pytest

from tests.report.fakes import BASIC, FakeStore
from ttvd.bench.store import Store
from ttvd.report.document import render_document
from ttvd.report.provenance import list_overrides
from ttvd.report.results import Results, is_honest
from ttvd.report.study_page import make_page
from ttvd.report.study_section import caption_table
from ttvd.report.tables import summary_table
from ttvd.report.words import METRICS


def test_captions_say_over_how_many_seeds_a_spread_is() -> None:
    results = Results(FakeStore(("basic", BASIC)).study("basic"))
    caption = caption_table(summary_table(results), results.lines, "").caption
    assert "± is the standard deviation over 2 seeds." in caption


def test_captions_say_that_one_seed_has_no_spread() -> None:
    results = Results(FakeStore(("basic", BASIC.replace("[0, 1]", "[0]"))).study("basic"))
    caption = caption_table(summary_table(results), results.lines, "").caption
    assert "One seed, so there is no spread." in caption


def test_the_headline_is_of_a_line_that_saw_no_test_labels() -> None:
    store = FakeStore(("basic", BASIC))
    results = Results(store.study("basic"))
    honest = [100 * (results.error(line) or 0.0) for line in results.lines if is_honest(line)]
    page = make_page(cast(Store, store))
    assert page.figures[1][0] == f"{min(honest):.1f} %"
    assert "chosen without test labels" in page.figures[1][1]


def test_intervals_over_few_batches_are_called_too_narrow() -> None:
    html = [render_document(make_page(cast(Store, FakeStore(("basic", BASIC), batches=n)))) for n in (8, 40)]
    assert "With only 8 batches in a stream they are too narrow" in html[0]
    assert "too narrow" not in html[1]
    assert all("not of others, and nothing is corrected" in text for text in html)


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
    text = dict(METRICS)["±"]
    assert "corrupted images stay the same" in text
