"""The results of a study as a Markdown document; above each table and picture stands how its numbers were made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ttvd.report.comparisons import duel_table, hold_duels
from ttvd.report.drawings import draw_conditions, draw_curves, draw_duels
from ttvd.report.export import to_markdown
from ttvd.report.paper import beside_table, mix_in
from ttvd.report.pictures import explain_choice, pick_lines
from ttvd.report.provenance import sum_up
from ttvd.report.results import BATCH_ECE, ECE, ERROR, Metric
from ttvd.report.study_section import DUELS, caption_table, describe_study, render_scale
from ttvd.report.tables import column_table, condition_table, journey_table, rules_table, summary_table
from ttvd.report.vector import to_svg
from ttvd.report.words import RULES

if TYPE_CHECKING:
    from ttvd.bench.spec import Run
    from ttvd.bench.study import Column
    from ttvd.report.comparisons import PairedComparison
    from ttvd.report.page import Table
    from ttvd.report.paper import Printed
    from ttvd.report.results import Results

MADE = "<!-- Made by `make results`; what is changed here is lost. -->"
SHOWN = (ERROR, ECE, BATCH_ECE)
CURVES = "Error over all samples seen so far, mean over seeds; the number at the end of a line is its final error. "
BY_CONDITION = "Mean error over the domains of each condition. "
DIFFERENCES = "Difference in error on the same batches, with 95 % intervals; left of zero: fewer errors."
BESIDE = (
    "The paper's means are those of its rows for single corruptions where it prints them, and its ECE is that of "
    "single batches, averaged: compare it with our batch ECE. Its network was trained elsewhere."
)


def render_results(results: Results, printed: Printed | None = None) -> tuple[str, dict[str, bytes]]:
    """The document of a study, and the pictures that it shows.

    Args:
        results: The study.
        printed: The paper's numbers for it.

    Returns:
        Markdown, and by name of the file in the folder ``figures`` the SVG of each picture.
    """
    recipe, runs = results.study.recipe, results.all_runs()
    comparisons = hold_duels(results)
    pictures = draw_pictures(results, comparisons) if runs else {}
    parts = [MADE, f"# {recipe.title}", recipe.note.strip(), describe_study(results), _render_gaps(results)]
    if runs:
        parts += [_list_facts(results, runs), *_list_tables(results, comparisons, printed)]
        parts += [_show(name, text) for name, (text, _) in pictures.items()]
        rules = dict.fromkeys(line.rule for line in results.lines)
        parts += ["## How settings are chosen", "\n".join(f"- **{rule}**: {RULES[rule]}" for rule in rules)]
    text = "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"
    return text, {name: picture for name, (_, picture) in pictures.items()}


def draw_pictures(results: Results, comparisons: Sequence[PairedComparison]) -> dict[str, tuple[str, bytes]]:
    """By name of the file: what a picture shows, of which runs, and its SVG."""
    name, lines = results.study.recipe.name, pick_lines(results)
    choice, made = explain_choice(results, lines), render_rows(results, results.all_runs())
    drawn = {
        "conditions": ("Error by condition", BY_CONDITION + choice, draw_conditions(results, lines)),
        "curves": ("Along the stream", CURVES + choice, draw_curves(results, lines)),
        "paired": ("Paired differences", DIFFERENCES, draw_duels(comparisons, lines, results)),
    }
    return {
        f"{name}-{kind}.svg": (f"## {title}\n\n{made}\n\n{text}", to_svg(figure, MADE))
        for kind, (title, text, figure) in drawn.items()
        if figure is not None
    }


def render_rows(results: Results, runs: Sequence[Run]) -> str:
    """In one paragraph, from the runs: command, seeds, data, hardware, versions and dates."""
    (_, command), *facts = sum_up(results, runs)
    told = [(name, value) for name, value in facts if name not in ("Models (weights)", "Precision")]
    return f"> `{command}`. " + " ".join(f"{name}: {value}." for name, value in told)


def _list_facts(results: Results, runs: Sequence[Run]) -> str:
    name = results.study.recipe.name
    links = [(title, f"rows/{name}.{end}") for title, end in (("Rows", "csv"), ("Recipe", "toml"))]
    facts = [*sum_up(results, runs), *((title, f"[{path}]({path})") for title, path in links)]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {_cell(name, value)} |" for name, value in facts)])


def _cell(name: str, value: str) -> str:
    return f"`{value}`" if name == "Command" else value.replace("|", "\\|")


def _render_gaps(results: Results) -> str:
    study = results.study
    if not study.missing and not study.failed:
        return ""
    return (
        f"**Not complete**: {study.failed} runs failed, {study.missing} are not done. Numbers that they touch carry a "
        "dagger (†) or are empty; a rule that misses runs compares the settings that have a whole seed, by the seeds "
        "that all of these have."
    )


def _list_tables(
    results: Results, comparisons: Sequence[PairedComparison], printed: Printed | None
) -> list[str]:
    runs, lines = results.all_runs(), results.lines
    parts: list[str] = []

    def add(title: str, table: Table, text: str, columns: Sequence[Column] | None = None) -> None:
        """A section with a table; above it how its rows were made, below it how to read it."""
        rows = runs if columns is None else _pick_runs(results, columns)
        caption = caption_table(table, lines, text).caption
        parts.append(f"## {title}\n\n{render_rows(results, rows)}\n\n{to_markdown(table)}\n{caption}")

    conditions = results.conditions()
    if printed is not None and (table := beside_table(results, printed)).rows:
        slips = printed.slips()
        noted = f" Averages in the paper that do not match their rows: {'; '.join(slips)}." if slips else ""
        add("Next to the paper", table, BESIDE + noted)
    if len({line.rule for line in lines}) > 1:
        for metric in SHOWN:
            add(f"{_title(metric)}: rules side by side", rules_table(results, metric), render_scale(metric))
    add("All lines", summary_table(results), "Means over all columns.")
    if len(conditions) > 1:
        for metric in SHOWN:
            add(f"{_title(metric)} by condition", condition_table(results, metric), render_scale(metric))
    for words, columns in conditions.items():
        for metric in SHOWN if len(columns) > 1 else ():
            table = column_table(results, columns, metric, "")
            title = f"{_title(metric)} by domain{f', {words}' if words else ''}"
            add(title, mix_in(table, results, columns, metric, printed), render_scale(metric), columns)
    for column in results.columns:
        journey = journey_table(results, column)
        if journey is not None:
            add(
                f"Domain after domain: {column.label}", journey, "Error in each domain in per cent.", [column]
            )
    if comparisons:
        content = to_markdown(duel_table(results, list(comparisons)))
        parts.append(f"## Who beats whom\n\n{render_rows(results, runs)}\n\n{content}\n{DUELS}")
    return parts


def _pick_runs(results: Results, columns: Sequence[Column]) -> list[Run]:
    return list({id(run): run for line in results.lines for run in results.runs(line, columns)}.values())


_TITLES: Mapping[str, str] = {
    "error": "Error",
    "ece": "ECE over the stream",
    "batch_ece": "ECE of single batches",
}


def _title(metric: Metric) -> str:
    return _TITLES[metric.name]


def _show(name: str, text: str) -> str:
    return f"{text}\n\n![{name.removesuffix('.svg')}](figures/{name})"
