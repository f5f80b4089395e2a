"""Tables of streams whose shift comes and goes: error after a change, by round, and on rare batches."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ttvd.bench.changes import (
    BACK,
    BACK_LATER,
    FIRST,
    RARE,
    SHIFTED,
    SHIFTED_LATER,
    USUAL,
    errors_by_part,
)
from ttvd.report.document import Cell, Table
from ttvd.report.results import ERROR, POINTS, Results, Value
from ttvd.report.tables import line_table, mark_best, value_cell

if TYPE_CHECKING:
    from ttvd.bench.spec import Run
    from ttvd.bench.study import Column, Line

Errors = dict[tuple["Column", int], dict[str, float]]
"""Error of each part of a stream, by column and seed."""
_EARLY, _LATER = f"first {FIRST}", "afterwards"
_TEXTS = {
    "onset": f"Error in per cent in the first {FIRST} images after a change, and afterwards: when the shift comes, and "
    "when clean images come back. Above a fresh start: minus the error of a new adapter on the same shifted images. "
    "Above source: minus the error of the same model without adaptation on the same clean images.",
    "recurring": "Error in per cent in each round through all domains.",
    "rare": "Error in per cent on the rare shifted batches and on the clean ones. Above source: minus the error of the "
    "same model without adaptation on the same images.",
}
_TITLES = {
    "onset": "After a change",
    "recurring": "Round after round",
    "rare": "Rare and usual batches",
}


@dataclass(frozen=True)
class _Group:
    """Columns of a table under one heading.

    Attributes:
        title: The heading.
        parts: Heading of each column, and the part of the stream that it shows.
        minus: What is subtracted: nothing, the fresh start, or the source model.
    """

    title: str
    parts: Mapping[str, str]
    minus: Literal["", "fresh", "source"] = ""


_SHIFT, _RETURN = {_EARLY: SHIFTED, _LATER: SHIFTED_LATER}, {_EARLY: BACK, _LATER: BACK_LATER}
_KINDS = {"shifted": RARE, "clean": USUAL}
_GROUPS = {
    "onset": (
        _Group("shifted (%)", _SHIFT),
        _Group("above a fresh start (points)", _SHIFT, "fresh"),
        _Group("clean again (%)", _RETURN),
        _Group("above source (points)", _RETURN, "source"),
    ),
    "rare": (_Group("error (%)", _KINDS), _Group("above source (points)", _KINDS, "source")),
}


@dataclass(frozen=True)
class ChangeTable:
    """A table of streams whose shift comes and goes.

    Attributes:
        title: Title of the table.
        table: The table, without a caption.
        text: What it shows.
        columns: Columns of the study that its numbers are means over.
    """

    title: str
    table: Table
    text: str
    columns: Sequence[Column]


def list_changes(results: Results) -> list[ChangeTable]:
    """Return a table for each condition; none for other streams, or where single batches are not known."""
    found = []
    for number, (words, columns) in enumerate(results.conditions().items(), 1):
        runs = [run for line in results.lines for run in results.runs(line, columns)]
        join = runs[0].spec.join if runs else "continual"
        groups = _list_rounds(runs) if join == "recurring" else _GROUPS.get(join, ())
        if not groups or not any(map(errors_by_part, runs)):
            continue
        name = f"{results.study.recipe.name}-changes{f'-{number}' if words else ''}"
        title = f"{_TITLES[join]}{f': {words}' if words else ''}"
        table = _make_table(results, columns, groups, name)
        found.append(ChangeTable(title, table, _TEXTS[join], columns))
    return found


def _list_rounds(runs: Iterable[Run]) -> tuple[_Group, ...]:
    rounds = max((run.spec.options["rounds"] for run in runs), default=0)
    return (_Group("error (%) in round", {str(number): str(number) for number in range(1, rounds + 1)}),)


def _make_table(results: Results, columns: Sequence[Column], groups: Sequence[_Group], name: str) -> Table:
    """Return a row for each line, with a column for each part of each group."""
    cells: list[list[Cell]] = []
    for group in groups:
        errors = [_collect_errors(results, line, columns, group.minus) for line in results.lines]
        metric = POINTS if group.minus else ERROR
        for part in group.parts.values():
            column = [
                value_cell(results, line, columns, _average(results, line, columns, found, part), metric)
                for line, found in zip(results.lines, errors, strict=True)
            ]
            cells.append(mark_best(column, results.lines))
    headings = [heading for group in groups for heading in group.parts]
    spans = [("", 2), *((group.title, len(group.parts)) for group in groups)]
    return line_table(results, cells, headings, name, spans)


def _collect_errors(results: Results, line: Line, columns: Sequence[Column], minus: str) -> Errors:
    """Return the errors of a line, or their differences from a fresh start or from the source model."""
    ours = _read_errors(line.runs, columns)
    if not minus:
        return ours
    source = _find_source(results, line)
    theirs = _read_errors(line.fresh if minus == "fresh" else source.runs if source else {}, columns)
    return {
        place: {part: error - theirs[place][part] for part, error in parts.items() if part in theirs[place]}
        for place, parts in ours.items()
        if place in theirs
    }


def _read_errors(runs: Mapping[Column, Sequence[Run]], columns: Sequence[Column]) -> Errors:
    return {
        (column, run.spec.seed): errors_by_part(run) for column in columns for run in runs.get(column, ())
    }


def _find_source(results: Results, line: Line) -> Line | None:
    """Return the line of the same model without adaptation on the same images; rather one with the same views."""
    found = [
        other
        for other in results.lines
        if (other.method, other.checkpoint) == ("source", line.checkpoint)
        and _list_limits(results, other) == _list_limits(results, line)
    ]
    # A method that handles views itself has none around it.
    return min(found, key=lambda other: other.views != line.views, default=None)


def _list_limits(results: Results, line: Line) -> set[int | None]:
    """Return the limits of the runs of a line; those of an oracle may differ from others."""
    return {run.spec.limit for run in results.runs(line)}


def _average(
    results: Results, line: Line, columns: Sequence[Column], errors: Errors, part: str
) -> Value | None:
    """Return the mean over columns and seeds; None if no seed has the part in all columns."""
    seeds = {run.spec.seed for run in results.runs(line)}
    means = [
        statistics.fmean(errors[column, seed][part] for column in columns)
        for seed in sorted(seeds)
        if all(part in errors.get((column, seed), {}) for column in columns)
    ]
    if not means:
        return None
    spread = statistics.stdev(means) if len(means) > 1 else None
    return Value(statistics.fmean(means), spread, len(means) == len(seeds))
