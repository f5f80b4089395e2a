"""Tables of a study: lines by metrics, by corruptions, by conditions, and several studies side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from ttvd.bench.run import sum_metrics
from ttvd.report.page import MISSING, Cell, Heading, Table
from ttvd.report.results import (
    BATCH_ECE,
    BRIER,
    ECE,
    ERROR,
    NLL,
    PLACES,
    TIERS,
    Metric,
    Results,
    Value,
    count,
    is_honest,
    show_pairs,
    show_rule,
    split_severity,
)

if TYPE_CHECKING:
    from ttvd.bench.study import Column, Line

FAMILIES = ("noise", "blur", "weather", "digital", "further")
LINE_HEADINGS = (Heading("method", under="model"), Heading("chosen by", under="setting"))
ABSENT = Cell("", "", hint="not asked for")
EDGES = (3, 7, 11, 15)
"""Where a family ends, in the order of the published tables."""


def summary_table(results: Results) -> Table:
    """A row for each line: all metrics over all columns, time and the share kept."""
    metrics = (replace(ERROR, digits=2), replace(ECE, digits=2), replace(BATCH_ECE, digits=2), NLL, BRIER)
    numbers = [metric_cells(results, results.columns, metric) for metric in metrics]
    numbers += [_timemetric_cells(results), _keptmetric_cells(results)]
    headings = [Heading(m.title, m.note) for m in metrics] + [Heading("ms per image"), Heading("kept (%)")]
    return _assemble(results, numbers, headings, f"{results.study.recipe.name}-summary")


def column_table(results: Results, columns: Sequence[Column], metric: Metric, name: str) -> Table:
    """A row for each line, a column for each domain and one for their mean."""
    parts = [split_severity(column.domain) for column in columns]
    one_severity = len({severity for _, severity in parts if severity}) == 1
    headings = [_shorten(name) if one_severity else f"{name} {severity}".strip() for name, severity in parts]
    numbers = [metric_cells(results, [column], metric) for column in columns]
    spans = [(family, len(list(group))) for family, group in groupby(_find_family(name) for name, _ in parts)]
    if len(columns) > 1:
        numbers.append(metric_cells(results, columns, metric))
        headings.append("mean")
        spans.append(("", 1))
    spans = [("", 2), *spans] if any(text for text, _ in spans) else []
    return _assemble(results, numbers, headings, name, spans)


def condition_table(results: Results, metric: Metric) -> Table:
    """A row for each line, a column for each condition: means over domains."""
    conditions = results.conditions()
    numbers = [metric_cells(results, columns, metric) for columns in conditions.values()]
    name = f"{results.study.recipe.name}-conditions-{metric.name}"
    return _assemble(results, numbers, list(conditions), name)


def journey_table(results: Results, column: Column) -> Table | None:
    """Error in each domain of streams that visit several, in the order of the visit; None for other columns."""
    runs = [run for line in results.lines for run in line.runs.get(column, ())]
    if not runs or len(runs[0].spec.domains) < 2 or runs[0].spec.join != "continual":
        return None
    domains = runs[0].spec.domains
    numbers = []
    for number in range(len(domains)):
        cells = []
        for line in results.lines:
            parts = [
                sum_metrics([row for row in run.record.rows if row.domain == number])
                for run in line.runs.get(column, ())
            ]
            errors = [part.compute()["error"] for part in parts]
            spread = statistics.stdev(errors) if len(errors) > 1 else None
            value = Value(statistics.fmean(errors), spread, True) if errors else None
            cells.append(_cell(results, line, [column], value, ERROR))
        numbers.append(_crown(cells, results.lines))
    return _assemble(
        results, numbers, [domain.label for domain in domains], f"{results.study.recipe.name}-domains"
    )


def rules_table(results: Results, metric: Metric) -> Table:
    """A row for each label, a column for each rule of selection, and how many seeds there are."""
    rules = [rule for rule in TIERS if any(line.rule == rule for line in results.lines)]
    cells = dict(zip(map(id, results.lines), metric_cells(results, results.columns, metric), strict=True))
    rows = []
    for label in dict.fromkeys(line.label for line in results.study.lines):
        lines = {line.rule: line for line in results.lines if line.label == label}
        numbers = [cells[id(lines[rule])] if rule in lines else ABSENT for rule in rules]
        seeds = max(len(line.seeds(results.columns)) for line in lines.values())
        rows.append([Cell(label, label), *numbers, Cell(str(seeds), seeds)])
    headings: list[str | Heading] = ["method", *(Heading(rule, metric.title) for rule in rules), "seeds"]
    return Table(headings, rows, name=f"{results.study.recipe.name}-rules-{metric.name}", heads=True)


def overview_table(several: Sequence[Results]) -> Table:
    """Error and calibration of every line in several studies, side by side."""
    rows = list(dict.fromkeys((line.label, line.rule) for results in several for line in results.lines))
    columns: list[list[Cell]] = []
    for results in several:
        place = {(line.label, line.rule): number for number, line in enumerate(results.lines)}
        for metric in (ERROR, ECE, BATCH_ECE):
            cells = metric_cells(results, results.columns, metric)
            columns.append([cells[place[row]] if row in place else MISSING for row in rows])
    names = [Heading(metric.title, metric.note) for metric in (ERROR, ECE, BATCH_ECE)]
    spans = [("", 2), *((results.study.recipe.title, 3) for results in several)]
    body = [
        [Cell(label, label), _rule_everywhere(several, label, rule), *(column[number] for column in columns)]
        for number, (label, rule) in enumerate(rows)
    ]
    headings: list[str | Heading] = [*LINE_HEADINGS, *(names * len(several))]
    tags = [rule for _, rule in rows]
    return Table(headings, body, spans=spans, name="overview", heads=True, tags=tags)


def _rule_everywhere(several: Sequence[Results], label: str, rule: str) -> Cell:
    """What :func:`rule_cell` says; where the studies differ in the setting, all of them in order."""
    lines = [line for r in several for line in r.lines if (line.label, line.rule) == (label, rule)]
    cells = [rule_cell(line) for line in lines]
    texts, notes = (
        list(dict.fromkeys(words)) for words in zip(*((c.text, c.note) for c in cells), strict=True)
    )
    return Cell(" / ".join(texts), texts[0], note=" / ".join(notes))


def title_cell(results: Results, line: Line) -> Cell:
    """The name of a line, with its model below it, and a dagger where runs are missing."""
    model = line.checkpoint if line.views == 1 else f"{line.checkpoint}, {line.views} views"
    note = f"{model}; {count(line.pending, 'run')} missing †" if line.pending else model
    return Cell(line.label, line.label, note=note, link=f"#{results.anchor(line)}")


def rule_cell(line: Line) -> Cell:
    """How the setting of a line was chosen, and what was chosen."""
    fixed = "one fixed setting" if line.tried == 1 else ""
    return Cell(show_rule(line), show_rule(line), note=show_pairs(line.parameters) or fixed)


def _assemble(
    results: Results,
    numbers: Sequence[Sequence[Cell]],
    headings: Sequence[str | Heading],
    name: str,
    spans: Sequence[tuple[str, int]] = (),
) -> Table:
    rows = [
        [title_cell(results, line), rule_cell(line), *(column[number] for column in numbers)]
        for number, line in enumerate(results.lines)
    ]
    tags = [line.rule for line in results.lines]
    return Table([*LINE_HEADINGS, *headings], rows, spans=spans, name=name, heads=True, tags=tags)


def metric_cells(results: Results, columns: Sequence[Column], metric: Metric) -> list[Cell]:
    """The cells of all lines; the best are marked."""
    cells = [
        _cell(results, line, columns, results.value(line, columns, metric.name), metric)
        for line in results.lines
    ]
    return _crown(cells, results.lines)


def _cell(
    results: Results, line: Line, columns: Sequence[Column], value: Value | None, metric: Metric
) -> Cell:
    if value is None:
        return MISSING
    text = f"{metric.scale * value.mean:.{metric.digits}f}"
    spread = "" if value.spread is None else f"±{metric.scale * value.spread:.{metric.digits}f}"
    link = results.anchor(line, columns[0] if len(columns) == 1 else None)
    mark = "" if value.whole else " †"
    return Cell(text + mark, metric.scale * value.mean, note=spread, link=f"#{link}")


def _crown(cells: Sequence[Cell], lines: Sequence[Line]) -> list[Cell]:
    """Mark the lowest: the best of all but oracles, and the best among lines that never saw labels."""
    crowned = list(cells)
    fair = [n for n, line in enumerate(lines) if line.rule != "oracle"]
    for number in _find_lowest(cells, fair):
        crowned[number] = replace(cells[number], best=True)
    for number in _find_lowest(cells, [n for n in fair if is_honest(lines[n])]):
        if not crowned[number].best:
            crowned[number] = replace(cells[number], marked=True)
    return crowned


def _find_lowest(cells: Sequence[Cell], candidates: Sequence[int]) -> list[int]:
    """Those that show the lowest number; a number that misses runs cannot be the best."""
    shown = {n: float(cells[n].text) for n in candidates if cells[n].value != "" and "†" not in cells[n].text}
    return [number for number, value in shown.items() if value == min(shown.values())]


def _timemetric_cells(results: Results) -> list[Cell]:
    times = [results.milliseconds(line) for line in results.lines]
    return [
        MISSING if time is None else Cell(f"{time:.3g}", time, link=f"#{results.anchor(line)}")
        for line, time in zip(results.lines, times, strict=True)
    ]


def _keptmetric_cells(results: Results) -> list[Cell]:
    shares = [results.kept(line) for line in results.lines]
    return [
        Cell("-", "", hint="takes no gradient steps")
        if share is None
        else Cell(f"{100 * share:.0f}", 100 * share, link=f"#{results.anchor(line)}")
        for line, share in zip(results.lines, shares, strict=True)
    ]


def _shorten(corruption: str) -> str:
    """Without what the heading above the column says, or what is clear from the first word."""
    words = ("noise", "blur", "transform", "compression")
    return " ".join(word for word in corruption.split() if word not in words)


def _find_family(corruption: str) -> str:
    if corruption not in PLACES:
        return ""
    return FAMILIES[sum(PLACES[corruption] >= edge for edge in EDGES)]
