"""The chapter of one recipe: its tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ttvd.report.comparisons import duel_table, hold_duels
from ttvd.report.document import Block, Code, Fold, Notice, Part, Section, Text
from ttvd.report.page import Table
from ttvd.report.pictures import (
    pick_lines,
    show_duels,
    show_each_stream,
    show_reliability,
    show_stream,
    show_tradeoffs,
)
from ttvd.report.provenance import list_overrides, render_origin
from ttvd.report.results import ECE, ERROR, METRICS, Metric, count, is_honest
from ttvd.report.style import house_style
from ttvd.report.tables import column_table, condition_table, journey_table, summary_table

if TYPE_CHECKING:
    from ttvd.bench.spec import Run
    from ttvd.bench.study import Column, Line
    from ttvd.report.results import Results


def render_study(
    results: Results, title: str, *, reference: str | None = None, figures: Sequence[Block] = ()
) -> Section:
    """Everything about one recipe.

    Args:
        results: Its numbers.
        title: Of the chapter.
        reference: Label of the line that the others are compared with; the recipe's unless given.
        figures: Drawn already from what the store holds.
    """
    recipe = results.study.recipe
    blocks: list[Block] = [Text([recipe.note] if recipe.note else []), Text([describe_study(results)])]
    blocks += _warn(results)
    if results.all_runs():
        summary = Part("All lines", [caption_table(summary_table(results), results.lines, _SUMMARY)])
        tables = _list_tables(results)
        blocks += [summary, *tables] if len(results.conditions()) == 1 else [*tables, summary]
        with house_style():
            blocks += _draw(results, reference)
    blocks += figures
    options = list_overrides(results)
    asked = f"As it was run, {recipe.name}.toml" + (f", with {' '.join(options)}" if options else "") + ":"
    blocks.append(Fold("The recipe", [Text([asked]), Code(recipe.text.strip())]))
    return Section(title, f"study-{results.number}", blocks)


_SUMMARY = "Means over all columns of the study."


def describe_study(results: Results) -> str:
    """Data, stream and size of the study in a sentence or two."""
    study, runs = results.study, results.all_runs()
    if not runs:
        return "None of its runs is done yet."
    specs = [run.spec for run in runs]
    images = _count_images(runs)
    domains = len({domain for spec in specs for domain in spec.domains})
    joined = sorted({spec.join for spec in specs if len(spec.domains) > 1})
    sizes = sorted({spec.batch_size for spec in specs})
    seeds = sorted({spec.seed for spec in specs})
    streams = sorted({spec.stream for spec in specs})
    origin = ", ".join(sorted({render_origin(spec) for spec in specs}))
    visited = f" in one stream ({', '.join(joined)})" if joined else ""
    parts = [count(domains, "domain") + visited, count(len(study.lines), "line"), count(len(seeds), "seed")]
    return (
        f"Data set {', '.join(sorted({spec.data for spec in specs}))}, {images} images in each stream, corruptions: "
        f"{origin}. {', '.join(parts)}; order {', '.join(streams)}, batches of {', '.join(map(str, sizes))}."
    )


def _count_images(runs: Sequence[Run]) -> str:
    """Images of a stream; where oracles saw another number, both."""
    counts: dict[bool, set[int]] = {False: set(), True: set()}
    for run in runs:
        seen = int(sum(row.metrics["n"] for row in run.record.rows))  # type: ignore[misc]
        counts[run.spec.selection == "oracle"].add(seen)
    usual, oracle = (" or ".join(f"{n:,}" for n in sorted(counts[kind])) for kind in (False, True))
    if not usual or not oracle or usual == oracle:
        return usual or oracle
    return f"{usual} (oracle lines: {oracle})"


def _warn(results: Results) -> list[Block]:
    study = results.study
    if not study.missing and not study.failed:
        return []
    return [
        Notice(
            f"Failed runs: {study.failed}; runs not done: {study.missing}. Numbers that they touch carry a dagger (†) "
            "or are empty; a rule that misses runs compares the settings that have a whole seed, by the seeds that all "
            "of these have."
        )
    ]


def _list_tables(results: Results) -> list[Block]:
    conditions = results.conditions()
    if len(conditions) == 1:
        return [*_by_domain(results, results.columns, results.study.recipe.name), *_journeys(results)]
    parts: list[Block] = [
        Part(
            f"{name_metric(metric)} by condition",
            [
                caption_table(
                    condition_table(results, metric),
                    results.lines,
                    "Means over the domains of each condition.",
                )
            ],
        )
        for metric in (ERROR, ECE)
    ]
    for number, (title, columns) in enumerate(conditions.items(), 1):
        if len(columns) > 1:
            name = f"{results.study.recipe.name}-{number}"
            parts.append(Fold(f"By domain: {title}", _by_domain(results, columns, name)))
    return parts + _journeys(results)


def _by_domain(results: Results, columns: Sequence[Column], name: str) -> list[Block]:
    if len(columns) < 2:
        return []

    def build(metric: Metric) -> Table:
        return caption_table(
            column_table(results, columns, metric, f"{name}-{metric.name}"),
            results.lines,
            render_scale(metric),
        )

    first, *others = METRICS
    folds = [Fold(f"{metric.title} by domain", [build(metric)]) for metric in others]
    return [Part("Error by domain", [build(first)]), *folds]


def render_scale(metric: Metric) -> str:
    """What the numbers of a table are, in a sentence."""
    unit = "per cent" if metric.scale == 100 else metric.note
    return f"{name_metric(metric)}{f' in {unit}' if unit else ''}."


def name_metric(metric: Metric) -> str:
    """Without the unit, at the beginning of a sentence."""
    name = metric.title.partition(" (")[0]
    return name[0].upper() + name[1:]


def _journeys(results: Results) -> list[Block]:
    """Streams that visit several domains without a fresh start."""
    found = [(column, journey_table(results, column)) for column in results.columns]
    text = "Error in each domain in per cent, in the order in which the one stream visits them."
    return [
        Part(f"Domain after domain: {column.label}", [caption_table(table, results.lines, text)])
        for column, table in found
        if table is not None
    ]


def caption_table(table: Table, lines: Sequence[Line], text: str) -> Table:
    """Say how to read the marks, as far as the lines have them."""
    oracle = (
        " (oracle lines, which see the labels, left out)"
        if any(line.rule == "oracle" for line in lines)
        else ""
    )
    marks = f" Lower is better; bold: the lowest of a column{oracle}"
    if any(not is_honest(line) and line.rule != "oracle" for line in lines) and any(map(is_honest, lines)):
        marks += "; underlined: the lowest of those whose setting was chosen without test labels, where that is another"
    return replace(table, caption=f"{text}{marks}.{_render_spread(table, lines)}")


def _render_spread(table: Table, lines: Sequence[Line]) -> str:
    counts = sorted(
        {len({run.spec.seed for runs in line.runs.values() for run in runs}) for line in lines} - {0}
    )
    if not any(cell.note.startswith("±") for row in table.rows for cell in row):
        return " One seed, so there is no spread." if counts == [1] else ""
    several = [number for number in counts if number > 1]
    single = "; lines without it have one seed" if 1 in counts else ""
    return f" ± is the standard deviation over {' or '.join(map(str, several))} seeds{single}."


def _draw(results: Results, reference: str | None) -> list[Block]:
    lines = pick_lines(results, reference)
    comparisons = hold_duels(results, reference)
    blocks: list[Block | None] = [show_stream(results, lines)]
    each = show_each_stream(results, lines) if len(results.columns) > 1 else None
    blocks.append(Fold("Curves of each column", [each]) if each is not None else None)
    blocks += [show_tradeoffs(results, lines), show_reliability(results, lines) if lines else None]
    if comparisons:
        table = duel_table(results, comparisons)
        blocks.append(show_duels(results, comparisons, lines))
        blocks.append(Fold("All comparisons as a table", [replace(table, caption=DUELS)]))
    return [block for block in blocks if block is not None]


DUELS = (
    "Difference in error to the reference on the same batches, negative: fewer errors. Intervals: bootstrap over "
    "batches, as pairs and within each run. They speak of these streams and these source models, not of others, and "
    "nothing is corrected for the number of comparisons."
)
