"""What the paper printed, next to what was measured."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from ttvd.report.page import MISSING, Cell, Table
from ttvd.report.results import BATCH_ECE, ECE, ERROR, Metric, split_severity
from ttvd.report.tables import ABSENT, metric_cells

if TYPE_CHECKING:
    from ttvd.bench.study import Column, Line
    from ttvd.report.results import Results

SEVERITY = "5"
PRINTED = {"error": "error", "batch_ece": "ece"}
"""Our metrics, and where the file has the paper's."""


@dataclass(frozen=True)
class Printed:
    """The paper's numbers for one study, in per cent.

    Attributes:
        names: What it calls our methods.
        main: By its names: ``error``, ``ece`` and, for some, ``oracle`` of its first table.
        rows: By metric (``error``, ``ece``) and name: the number of each corruption.
        averages: Likewise: the mean that it prints.
    """

    names: Mapping[str, str]
    main: Mapping[str, Mapping[str, float]]
    rows: Mapping[str, Mapping[str, Mapping[str, float]]]
    averages: Mapping[str, Mapping[str, float]]

    def find(self, line: Line) -> str | None:
        """What the paper calls a line; None for one that it does not have, such as a control."""
        name = self.names.get(line.method) if line.label == line.method else None
        known = {*self.main, *(name for rows in self.rows.values() for name in rows)}
        return name if name in known else None

    def mean(self, metric: str, name: str) -> float | None:
        """The mean of a row, whatever the paper prints below "Avg."; without a row, what its first table has."""
        row = self.rows.get(metric, {}).get(name)
        return statistics.fmean(row.values()) if row else self.main.get(name, {}).get(metric)

    def slips(self) -> list[str]:
        """Averages that do not match their rows: rounding can move each of the two by 0.05."""
        found = []
        for metric, rows in self.rows.items():
            for name, row in rows.items():
                mean, average = statistics.fmean(row.values()), self.averages[metric][name]
                if abs(mean - average) > 0.1:
                    found.append(
                        f"{name} ({metric}): it prints {average:.1f}, its row has the mean {mean:.2f}"
                    )
        return found


def read_paper(path: Path) -> dict[str, Printed]:
    """The numbers of a file such as results/paper.toml, by the recipe that they compare with.

    Raises:
        ValueError: A row does not have a number for each corruption.
    """
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    names, corruptions = document.pop("methods"), document.pop("corruptions")
    found: dict[str, Printed] = {}
    for title, part in document.items():
        recipes, main = part.pop("recipes"), part.pop("main", {})
        rows: dict[str, dict[str, dict[str, float]]] = {}
        for metric, table in part.items():
            for name, entry in table.items():
                if len(entry["row"]) != len(corruptions):
                    raise ValueError(
                        f"{path}: [{title}.{metric}] {name} has {len(entry['row'])} numbers for "
                        f"{len(corruptions)} corruptions"
                    )
                rows.setdefault(metric, {})[name] = dict(zip(corruptions, entry["row"], strict=True))
        averages = {
            metric: {name: e["average"] for name, e in table.items()} for metric, table in part.items()
        }
        found |= dict.fromkeys(recipes, Printed(names, main, rows, averages))
    return found


def beside_table(results: Results, printed: Printed) -> Table:
    """A row for each label that the paper has too: its numbers and ours, with the same rules."""
    rows = []
    cells = {
        metric.name: dict(
            zip(map(id, results.lines), metric_cells(results, results.columns, metric), strict=True)
        )
        for metric in (ERROR, ECE, BATCH_ECE)
    }

    def ours(lines: Mapping[str, Line], metric: Metric, *rules: str) -> Cell:
        line = next((lines[rule] for rule in rules if rule in lines), None)
        return ABSENT if line is None else cells[metric.name][id(line)]

    for label in dict.fromkeys(line.label for line in results.study.lines):
        lines: dict[str, Line] = {line.rule: line for line in results.lines if line.label == label}
        name = printed.find(next(iter(lines.values())))
        if name is not None:
            numbers = [
                _number(printed.mean("error", name)),
                ours(lines, ERROR, "grid-best", "last"),
                ours(lines, ERROR, "validation", "last"),
                _number(printed.main.get(name, {}).get("oracle")),
                ours(lines, ERROR, "oracle"),
                _number(printed.mean("ece", name)),
                ours(lines, BATCH_ECE, "grid-best", "last"),
                ours(lines, ECE, "grid-best", "last"),
            ]
            rows.append([Cell(label, label), Cell(name, name), *numbers])
    # A column that is empty in all rows says nothing.
    used = [0, 1, *(n for n in range(2, 2 + len(_BESIDE)) if any(row[n].value != "" for row in rows))]
    above = [
        ("", 2),
        *((group, len(list(some))) for group, some in groupby(_BESIDE[n - 2][0] for n in used[2:])),
    ]
    headings = ["method", "in the paper", *(_BESIDE[n - 2][1] for n in used[2:])]
    body = [[row[n] for n in used] for row in rows]
    return Table(headings, body, spans=above, name=f"{results.study.recipe.name}-paper", heads=True)


_BESIDE = (
    *(("error (%)", name) for name in ("paper", "grid-best", "validation", "paper, oracle", "oracle")),
    *(("ECE (%), grid-best", name) for name in ("paper", "batch ECE", "stream ECE")),
)
"""Groups and names of the columns behind the first two."""


def mix_in(
    table: Table, results: Results, columns: Sequence[Column], metric: Metric, printed: Printed | None
) -> Table:
    """A table of corruptions with the paper's rows below ours of the same rule.

    Args:
        table: As ``column_table`` makes it.
        results: Whose lines are its rows.
        columns: Of the table.
        metric: Of the table.
        printed: The paper's numbers; None leaves the table as it is.
    """
    corruptions = [
        name.replace(" ", "_") for name, _ in (split_severity(column.domain) for column in columns)
    ]
    same = all(split_severity(column.domain)[1] == SEVERITY for column in columns)
    if printed is None or not same or metric.name not in PRINTED:
        return table
    places = {
        name: place
        for place, line in enumerate(results.lines)
        if line.rule in ("grid-best", "last") and (name := printed.find(line)) is not None
    }
    after = {place: name for name, place in places.items()}
    rows = []
    for place, row in enumerate(table.rows):
        rows.append(row)
        numbers = printed.rows.get(PRINTED[metric.name], {}).get(after.get(place, ""), {})
        if numbers and set(corruptions) <= set(numbers):
            shown = [numbers[name] for name in corruptions]
            shown += [statistics.fmean(shown)] if len(shown) > 1 else []
            title = f"paper: {after[place]}"
            rows.append([Cell(title, title), Cell("grid-best", "grid-best"), *map(_number, shown)])
    return replace(table, rows=rows, tags=())


def show_printed(printed: Printed | None, metric: str, line: Line | None) -> Cell:
    """The mean that the paper has for a line; nothing where it has none."""
    name = None if printed is None or line is None else printed.find(line)
    return ABSENT if printed is None or name is None else _number(printed.mean(metric, name))


def _number(value: float | None) -> Cell:
    return MISSING if value is None else Cell(f"{value:.1f}", value)
