"""Tables of differences between two stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ttvd.bench.compare import paired_difference
from ttvd.report.comparisons import DRAWS, pair_records
from ttvd.report.page import MISSING, Cell, Heading, Table
from ttvd.report.results import show_pairs, show_rule
from ttvd.report.tables import rule_cell

if TYPE_CHECKING:
    from ttvd.bench.spec import Run
    from ttvd.bench.study import Column, Line

Pair = tuple[float, float]
TINY = 1e-12
"""Sums of the same numbers in another order differ by less."""


@dataclass(frozen=True, eq=False)
class CellChange:
    """A line in a column, now and before."""

    line: Line
    column: Column
    now: Sequence[Run]
    before: Sequence[Run]

    @cached_property
    def error(self) -> Pair:
        """Now and before."""
        return _mean(self.now, "error"), _mean(self.before, "error")

    @cached_property
    def ece(self) -> Pair:
        """Now and before."""
        return _mean(self.now, "ece"), _mean(self.before, "ece")

    @property
    def differs(self) -> bool:
        """Whether error or ECE is another."""
        return any(abs(now - before) > TINY for now, before in (self.error, self.ece))


@dataclass(frozen=True, eq=False)
class LineChange:
    """A line over all columns that both stores have."""

    now: Line
    before: Line
    columns: Sequence[Column]

    def values(self, metric: str) -> Pair | None:
        """Means now and before; None where one of them misses runs."""
        now, before = self.now.mean(metric, self.columns), self.before.mean(metric, self.columns)
        return None if now is None or before is None else (now, before)

    @property
    def differs(self) -> bool:
        """Whether error, ECE or the chosen setting is another."""
        pairs = [self.values(metric) for metric in ("error", "ece")]
        moved = any(pair is not None and abs(pair[0] - pair[1]) > TINY for pair in pairs)
        return moved or dict(self.now.parameters) != dict(self.before.parameters)


def line_table(changes: Sequence[LineChange], name: str) -> Table:
    """A row for each line whose mean or setting changed."""
    rows = []
    for change in changes:
        setting, now = _settings(change)
        chosen = replace(rule_cell(change.now), note=now) if now else rule_cell(change.now)
        was = Cell(setting, setting)
        error, ece = _change_cells(change.values("error")), _change_cells(change.values("ece"))
        rows.append([Cell(change.now.label, change.now.label), chosen, was, *error, _interval(change), *ece])
    headings: list[str | Heading] = [
        "method",
        Heading("chosen by", under="setting"),
        Heading("setting", "before"),
        *_THREE,
        Heading("95 % interval", "paired", under="verdict"),
        *_THREE,
    ]
    return Table(
        headings, rows, _CAPTION, [("", 3), ("error (%)", 4), ("ECE (%)", 3)], name=name, heads=True,
        tags=[change.now.rule for change in changes],
    )  # fmt: skip


def _settings(change: LineChange) -> tuple[str, str]:
    """The parameters that differ, before and now: those that a grid chose, or else those that were set."""
    if dict(change.now.parameters) != dict(change.before.parameters):
        return show_pairs(change.before.parameters), show_pairs(change.now.parameters)
    before, now = (_first_parameters(line, change.columns) for line in (change.before, change.now))
    names = [name for name in now if name != "seed" and name in before and now[name] != before[name]]
    return show_pairs({name: before[name] for name in names}), show_pairs({name: now[name] for name in names})


def _first_parameters(line: Line, columns: Sequence[Column]) -> Mapping[str, Any]:
    runs = [run for column in columns for run in line.runs.get(column, ())]
    return runs[0].spec.parameters if runs else {}


def cell_table(changes: Sequence[CellChange], name: str) -> Table:
    """A row for each line and column that changed."""
    rows = []
    for change in changes:
        rule = show_rule(change.line)
        runs = f"{_keys(change.before)} → {_keys(change.now)}"
        rows.append(
            [
                Cell(change.line.label, change.line.label),
                Cell(rule, rule),
                Cell(change.column.label, change.column.label),
                *_change_cells(change.error),
                *_change_cells(change.ece),
                Cell(runs, runs),
            ]
        )
    headings: list[str | Heading] = [
        "method",
        "chosen by",
        "column",
        *_THREE,
        *_THREE,
        Heading("runs", "before → now, first digits"),
    ]
    spans = [("", 3), ("error (%)", 3), ("ECE (%)", 3), ("", 1)]
    return Table(
        headings, rows, _CAPTION, spans, name=name, heads=True, tags=[change.line.rule for change in changes]
    )


def count_table(new: Counter[tuple[str, str, str]], gone: Counter[tuple[str, str, str]]) -> Table:
    """How many runs of each method, model and data set came and went."""
    rows = [
        [
            *(Cell(word, word) for word in kind),
            Cell(f"{new[kind]}", new[kind]),
            Cell(f"{gone[kind]}", gone[kind]),
        ]
        for kind in sorted({*new, *gone})
    ]
    return Table(["method", "model", "data set", "new", "gone"], rows, name="new-and-gone", heads=True)


def changed_runs_table(pairs: Sequence[tuple[Run, Run]]) -> Table:
    """Runs that were asked the same and answered something else, with what may be the reason."""
    rows = []
    for now, before in pairs:
        spec = now.spec
        words = [spec.key, spec.method, spec.domain_label, str(spec.seed)]
        error = _change_cells((now.totals["error"], before.totals["error"]))
        ece = _change_cells((now.totals["ece"], before.totals["ece"]))
        versions = [show_pairs(run.facts.versions) for run in (before, now)]
        devices = [f"{run.facts.device}, threads {run.facts.threads}" for run in (before, now)]
        facts = [_compare(*versions), _compare(*devices)]
        rows.append([*(Cell(word, word) for word in words), *error, *ece, *facts])
    headings: list[str | Heading] = [
        "run",
        "method",
        "column",
        "seed",
        *_THREE,
        *_THREE,
        Heading("versions", under="versions now"),
        Heading("device", under="device now"),
    ]
    spans = [("", 4), ("error (%)", 3), ("ECE (%)", 3), ("", 2)]
    return Table(headings, rows, _CAPTION, spans, name="changed-runs", heads=True)


_THREE = ("before", "now", "change")
_CAPTION = "Change is now minus before, in points of a per cent: negative is better."


def _compare(before: str, now: str) -> Cell:
    text = "the same" if before == now else f"{before} → {now}"
    return Cell(text, text, note=now if before == now else "")


def _change_cells(pair: Pair | None) -> list[Cell]:
    """Before, now and the change, which has a sign and a colour."""
    if pair is None:
        return [MISSING] * 3
    now, before = (100 * value for value in pair)
    change = now - before
    tone = "" if abs(change) < 0.005 else "better" if change < 0 else "worse"
    text = f"{change:+.2f}" if abs(change) >= 0.005 else "0" if abs(change) < 100 * TINY else f"{change:+.0e}"
    return [Cell(f"{before:.2f}", before), Cell(f"{now:.2f}", now), Cell(text, change, tone=tone)]


def _interval(change: LineChange) -> Cell:
    """Of the change in error, on streams that both stores have."""
    first, second = pair_records(
        [run for column in change.columns for run in change.now.runs.get(column, ())],
        [run for column in change.columns for run in change.before.runs.get(column, ())],
    )
    if not first or change.values("error") is None:
        return Cell("-", "", hint="the streams are not the same, or runs are missing")
    gap = paired_difference(first, second, draws=DRAWS)
    word = {"better": "fewer errors", "worse": "more errors", "tie": "no clear change"}[gap.verdict]
    return Cell(f"{100 * gap.low:+.2f} to {100 * gap.high:+.2f}", 100 * gap.low, note=word)


def _mean(runs: Sequence[Run], metric: str) -> float:
    return fmean(run.totals[metric] for run in runs)


def _keys(runs: Sequence[Run]) -> str:
    return " ".join(run.spec.key[:8] for run in runs)
