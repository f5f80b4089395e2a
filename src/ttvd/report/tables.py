"""Tables of a study: lines by metrics, by domains, by conditions, by rules, and paired comparisons."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ttvd.bench.compare import Interval, paired_differences
from ttvd.bench.packed import has_batches
from ttvd.bench.run import Record, sum_metrics
from ttvd.report.document import MISSING, Cell, Heading, Table, text_cell
from ttvd.report.results import (
    BATCH_ECE,
    BRIER,
    ECE,
    ERROR,
    LABEL_USE,
    NLL,
    PLACES,
    Metric,
    Results,
    Value,
    chosen_without_labels,
    count,
    format_pairs,
    format_rule,
    split_severity,
)

if TYPE_CHECKING:
    from ttvd.bench.spec import Run
    from ttvd.bench.study import Column, Line

FAMILIES = ("noise", "blur", "weather", "digital", "further")
FAMILY_ENDS = (3, 7, 11, 15)
"""Where a family of corruptions ends, in the order of the published tables."""

LINE_HEADINGS = (Heading("method", under="model"), Heading("chosen by", under="setting"))
NOT_ASKED = Cell("", "", hint="not asked for")
DRAWS = 2000
"""Bootstrap draws of an interval."""

VERDICTS = {"better": "fewer errors", "worse": "more errors", "tie": "no clear difference"}


def summary_table(results: Results) -> Table:
    """Return a row for each line: all metrics over all columns, time and the share kept."""
    metrics = (replace(ERROR, digits=2), replace(ECE, digits=2), replace(BATCH_ECE, digits=2), NLL, BRIER)
    cells = [metric_cells(results, results.columns, metric) for metric in metrics]
    cells += [time_cells(results), kept_cells(results)]
    headings = [Heading(m.title, m.note) for m in metrics] + [Heading("ms per image"), Heading("kept (%)")]
    return line_table(results, cells, headings, f"{results.study.recipe.name}-summary")


def domain_table(results: Results, columns: Sequence[Column], metric: Metric, name: str) -> Table:
    """Return a row for each line, with a column for each domain and one for their mean."""
    parts = [split_severity(column.domain) for column in columns]
    one_severity = len({severity for _, severity in parts if severity}) == 1
    headings = [_shorten(name) if one_severity else f"{name} {severity}".strip() for name, severity in parts]
    cells = [metric_cells(results, [column], metric) for column in columns]
    spans = [
        (family, len(list(group)))
        for family, group in itertools.groupby(_find_family(name) for name, _ in parts)
    ]
    if len(columns) > 1:
        cells.append(metric_cells(results, columns, metric))
        headings.append("mean")
        spans.append(("", 1))
    spans = [("", 2), *spans] if any(text for text, _ in spans) else []
    return line_table(results, cells, headings, name, spans)


def condition_table(results: Results, metric: Metric) -> Table:
    """Return a row for each line, with a column for each condition: means over domains."""
    conditions = results.conditions()
    cells = [metric_cells(results, columns, metric) for columns in conditions.values()]
    name = f"{results.study.recipe.name}-conditions-{metric.name}"
    return line_table(results, cells, list(conditions), name)


def continual_table(results: Results, column: Column) -> Table | None:
    """Return the error in each domain of a continual stream, in the order of the stream; None for other columns."""
    runs = [run for line in results.lines for run in line.runs.get(column, ())]
    if not runs or len(runs[0].spec.domains) < 2 or runs[0].spec.join != "continual":
        return None
    domains = runs[0].spec.domains
    columns = []
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
            cells.append(value_cell(results, line, [column], value, ERROR))
        columns.append(mark_best(cells, results.lines))
    name = f"{results.study.recipe.name}-domains"
    return line_table(results, columns, [domain.label for domain in domains], name)


def rules_table(results: Results, metric: Metric) -> Table:
    """Return a row for each label, with a column for each rule of selection and the number of seeds."""
    rules = [rule for rule in LABEL_USE if any(line.rule == rule for line in results.lines)]
    cells = cells_by_line(results, metric)
    rows = []
    for label in dict.fromkeys(line.label for line in results.study.lines):
        lines = {line.rule: line for line in results.lines if line.label == label}
        numbers = [cells[id(lines[rule])] if rule in lines else NOT_ASKED for rule in rules]
        seeds = max(len(line.seeds(results.columns)) for line in lines.values())
        rows.append([text_cell(label), *numbers, Cell(str(seeds), seeds)])
    headings: list[str | Heading] = ["method", *(Heading(rule, metric.title) for rule in rules), "seeds"]
    return Table(headings, rows, name=f"{results.study.recipe.name}-rules-{metric.name}", heads=True)


def overview_table(several: Sequence[Results]) -> Table:
    """Return error and calibration of every line in several studies, side by side."""
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
        [text_cell(label), _shared_rule_cell(several, label, rule), *(column[number] for column in columns)]
        for number, (label, rule) in enumerate(rows)
    ]
    headings: list[str | Heading] = [*LINE_HEADINGS, *(names * len(several))]
    tags = [rule for _, rule in rows]
    return Table(headings, body, spans=spans, name="overview", heads=True, tags=tags)


def _shared_rule_cell(several: Sequence[Results], label: str, rule: str) -> Cell:
    """Return the rule and setting of a line; if the studies differ in the setting, all settings in order."""
    lines = [line for r in several for line in r.lines if (line.label, line.rule) == (label, rule)]
    cells = [rule_cell(line) for line in lines]
    texts, notes = (
        list(dict.fromkeys(words)) for words in zip(*((c.text, c.note) for c in cells), strict=True)
    )
    return Cell(" / ".join(texts), texts[0], note=" / ".join(notes))


def title_cell(results: Results, line: Line) -> Cell:
    """Return the label of a line with its model below it, and a dagger if runs are missing."""
    model = line.checkpoint if line.views == 1 else f"{line.checkpoint}, {line.views} views"
    note = f"{model}; {count(line.pending, 'run')} missing †" if line.pending else model
    return text_cell(line.label, note=note, link=f"#{results.anchor(line)}")


def rule_cell(line: Line) -> Cell:
    """Return the rule that chose the setting of a line, with the setting below it."""
    fixed = "one fixed setting" if line.tried == 1 else ""
    return text_cell(format_rule(line), note=format_pairs(line.parameters) or fixed)


def line_table(
    results: Results,
    cells: Sequence[Sequence[Cell]],
    headings: Sequence[str | Heading],
    name: str,
    spans: Sequence[tuple[str, int]] = (),
) -> Table:
    """Return a table with a row for each line, of columns of cells."""
    rows = [
        [title_cell(results, line), rule_cell(line), *(column[number] for column in cells)]
        for number, line in enumerate(results.lines)
    ]
    tags = [line.rule for line in results.lines]
    return Table([*LINE_HEADINGS, *headings], rows, spans=spans, name=name, heads=True, tags=tags)


def metric_cells(results: Results, columns: Sequence[Column], metric: Metric) -> list[Cell]:
    """Return the cells of all lines; the best are marked."""
    cells = [
        value_cell(results, line, columns, results.value(line, columns, metric.name), metric)
        for line in results.lines
    ]
    return mark_best(cells, results.lines)


def cells_by_line(results: Results, metric: Metric) -> dict[int, Cell]:
    """Return the cells of :func:`metric_cells` over all columns, by ``id(line)``."""
    cells = metric_cells(results, results.columns, metric)
    return dict(zip(map(id, results.lines), cells, strict=True))


def value_cell(
    results: Results, line: Line, columns: Sequence[Column], value: Value | None, metric: Metric
) -> Cell:
    """Return the cell of a mean over seeds, which links to the runs of the line."""
    if value is None:
        return MISSING
    sign = "+z" if metric.signed else ""
    text = f"{metric.scale * value.mean:{sign}.{metric.digits}f}"
    spread = "" if value.spread is None else f"±{metric.scale * value.spread:.{metric.digits}f}"
    link = results.anchor(line, columns[0] if len(columns) == 1 else None)
    mark = "" if value.complete else " †"
    return Cell(text + mark, metric.scale * value.mean, note=spread, link=f"#{link}")


def mark_best(cells: Sequence[Cell], lines: Sequence[Line]) -> list[Cell]:
    """Mark the lowest number of all lines but oracles, and the lowest among lines that use no labels."""
    marked = list(cells)
    candidates = [n for n, line in enumerate(lines) if line.rule != "oracle"]
    for number in _find_lowest(cells, candidates):
        marked[number] = replace(cells[number], best=True)
    for number in _find_lowest(cells, [n for n in candidates if chosen_without_labels(lines[n])]):
        if not marked[number].best:
            marked[number] = replace(cells[number], marked=True)
    return marked


def _find_lowest(cells: Sequence[Cell], candidates: Sequence[int]) -> list[int]:
    """Return the cells that show the lowest number; a number that misses runs cannot be the best."""
    shown = {n: float(cells[n].text) for n in candidates if cells[n].value != "" and "†" not in cells[n].text}
    return [number for number, value in shown.items() if value == min(shown.values())]


def time_cells(results: Results) -> list[Cell]:
    """Return the milliseconds for each image of all lines."""
    times = [results.milliseconds(line) for line in results.lines]
    return [
        MISSING if time is None else Cell(f"{time:.3g}", time, link=f"#{results.anchor(line)}")
        for line, time in zip(results.lines, times, strict=True)
    ]


def kept_cells(results: Results) -> list[Cell]:
    """Return the share of samples that all lines use in gradient steps."""
    shares = [results.kept(line) for line in results.lines]
    return [
        Cell("-", "", hint="takes no gradient steps")
        if share is None
        else Cell(f"{100 * share:.0f}", 100 * share, link=f"#{results.anchor(line)}")
        for line, share in zip(results.lines, shares, strict=True)
    ]


def _shorten(corruption: str) -> str:
    """Drop the words that the heading above the column says, or that are clear without them."""
    dropped = ("noise", "blur", "transform", "compression")
    return " ".join(word for word in corruption.split() if word not in dropped)


def _find_family(corruption: str) -> str:
    if corruption not in PLACES:
        return ""
    return FAMILIES[sum(PLACES[corruption] >= end for end in FAMILY_ENDS)]


@dataclass(frozen=True)
class PairedComparison:
    """A line against its reference on the same batches.

    Attributes:
        line: The line.
        reference: The line that it is compared with.
        total: Difference in error over all streams that both saw; negative: the line is better. None without such.
        verdicts: For each column that both have: ``"better"``, ``"worse"`` or ``"tie"``.
        unpaired: Number of runs of the line for which the reference has no run on the same stream.
    """

    line: Line
    reference: Line
    total: Interval | None
    verdicts: tuple[str, ...]
    unpaired: int


def compare_lines(results: Results, label: str | None = None) -> list[PairedComparison]:
    """Compare every line with the reference.

    Args:
        results: The study.
        label: Label of the reference; that of the recipe by default.

    Raises:
        ValueError: No line has that label.
    """
    labels = {line.label for line in results.lines}
    if label is not None and label not in labels:
        raise ValueError(f"no line is called {label!r}; there are: {', '.join(sorted(labels))}")
    pairs = [(line, other) for line in results.lines if (other := results.reference(line, label)) is not None]
    # By line and column, then all columns of a line together; empty where the two have no stream in common.
    matched = [
        [pair_records(line.runs.get(c, ()), other.runs.get(c, ())) for c in results.columns]
        for line, other in pairs
    ]
    joined = [_join_pairs(columns) for columns in matched]
    intervals = paired_differences([*itertools.chain(*matched), *joined], draws=DRAWS)
    comparisons = []
    for number, ((line, other), columns) in enumerate(zip(pairs, matched, strict=True)):
        single = intervals[number * len(columns) : (number + 1) * len(columns)]
        verdicts = tuple(interval.verdict for interval in single if interval is not None)
        unpaired = len(results.runs(line)) - sum(len(ours) for ours, _ in columns)
        total = intervals[len(intervals) - len(pairs) + number]
        comparisons.append(PairedComparison(line, other, total, verdicts, unpaired))
    return comparisons


def _join_pairs(pairs: Sequence[tuple[list[Record], list[Record]]]) -> tuple[list[Record], list[Record]]:
    ours, theirs = ([record for pair in pairs for record in pair[side]] for side in (0, 1))
    return ours, theirs


def pair_records(runs: Sequence[Run], reference: Sequence[Run]) -> tuple[list[Record], list[Record]]:
    """Pair the records of runs on the same streams: order of the samples and sizes of the batches must agree.

    Runs of which only sums are known have no batches to compare, and are left out.
    """
    others = {run.facts.order: run.record for run in reference if has_batches(run)}
    pairs = [
        (run.record, others[run.facts.order])
        for run in runs
        if has_batches(run)
        and run.facts.order in others
        and run.record.sizes().tolist() == others[run.facts.order].sizes().tolist()
    ]
    return [one for one, _ in pairs], [other for _, other in pairs]


def comparison_table(results: Results, comparisons: Sequence[PairedComparison]) -> Table:
    """Return a row for each comparison: the difference, its interval, and wins, ties and losses over the columns."""
    rows = []
    for comparison in comparisons:
        link = f"#{results.anchor(comparison.line)}"
        counts = [comparison.verdicts.count(verdict) for verdict in ("better", "tie", "worse")]
        against = text_cell(
            results.name(comparison.reference), link=f"#{results.anchor(comparison.reference)}"
        )
        total = comparison.total
        change, interval = MISSING, MISSING
        if total is not None:
            change = Cell(f"{100 * total.difference:+.2f}", 100 * total.difference, link=link)
            interval = replace(interval_cell(total), link=link)
        names = [title_cell(results, comparison.line), rule_cell(comparison.line), against]
        rows.append([*names, change, interval, *(Cell(str(n), n, link=link) for n in counts)])
    headings: list[str | Heading] = [
        *LINE_HEADINGS,
        "against",
        Heading("difference", "points of error"),
        Heading("95 % interval", "paired", under="verdict"),
        "better",
        "tie",
        "worse",
    ]
    tags = [comparison.line.rule for comparison in comparisons]
    spans = [("", 5), ("columns in which it is", 3)]
    name = f"{results.study.recipe.name}-paired"
    return Table(headings, rows, spans=spans, name=name, heads=True, tags=tags)


def interval_cell(interval: Interval, tie: str = VERDICTS["tie"]) -> Cell:
    """Return an interval in points of error, with its verdict below it."""
    text = f"{100 * interval.low:+.2f} to {100 * interval.high:+.2f}"
    return Cell(
        text, 100 * interval.low, note=tie if interval.verdict == "tie" else VERDICTS[interval.verdict]
    )
