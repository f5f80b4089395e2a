"""What changed between two stores: new, removed and changed runs, and the effect on the tables."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ttvd.bench.compare import paired_difference
from ttvd.bench.packed import PackedRecord, has_batches
from ttvd.bench.run import sum_metrics
from ttvd.bench.study import study
from ttvd.report.document import (
    MISSING,
    Block,
    Cell,
    Code,
    Document,
    Fold,
    Heading,
    Notice,
    Part,
    Section,
    Table,
    Text,
    text_cell,
)
from ttvd.report.results import Results, format_pairs, format_rule
from ttvd.report.tables import DRAWS, interval_cell, pair_records, rule_cell

if TYPE_CHECKING:
    from ttvd.bench.run import Record, Row
    from ttvd.bench.spec import Run
    from ttvd.bench.store import Reader
    from ttvd.bench.study import Column, Line

Values = tuple[float, float]
"""A number now and before."""

TINY = 1e-12
"""Sums of the same numbers in another order differ by less."""

LONG = 30
"""Number of rows above which a table is folded."""

_CHANGE = ("before", "now", "change")
_CAPTION = "Change is now minus before, in percentage points: negative is better."


@dataclass(frozen=True)
class RunChanges:
    """The runs of two stores, matched by key.

    Attributes:
        new: Runs that only the first store has.
        removed: Runs that only the second store has.
        changed: Runs that both have, with different rows: now and before.
        equal: Number of runs that both have with the same rows.
    """

    new: Sequence[Run]
    removed: Sequence[Run]
    changed: Sequence[tuple[Run, Run]]
    equal: int


def compare_runs(now: Reader, before: Reader) -> RunChanges:
    """Match the runs of two stores by key; rows are equal if everything but their times is."""
    ours, theirs = now.load(now.done()), before.load(before.done())
    both = sorted(set(ours) & set(theirs))
    changed = [(ours[key], theirs[key]) for key in both if not have_same_rows(ours[key], theirs[key])]
    new = [ours[key] for key in sorted(set(ours) - set(theirs))]
    removed = [theirs[key] for key in sorted(set(theirs) - set(ours))]
    return RunChanges(new, removed, changed, len(both) - len(changed))


def have_same_rows(one: Run, other: Run) -> bool:
    """Return whether two runs have the same rows, as far as both have them; times do not count."""
    ours, theirs = one.record, other.record
    whole = has_batches(one) and has_batches(other)
    if whole and not isinstance(ours, PackedRecord) and not isinstance(theirs, PackedRecord):
        return len(ours.rows) == len(theirs.rows) and all(
            (a.metrics, a.domain, repr(a.kept)) == (b.metrics, b.domain, repr(b.kept))
            for a, b in zip(ours.rows, theirs.rows, strict=True)
        )
    if whole and not (ours.sizes().equal(theirs.sizes()) and ours.wrong().equal(theirs.wrong())):
        return False
    sums, others = _sum_domains(ours), _sum_domains(theirs)
    return sums.keys() == others.keys() and all(_are_close(sums[name], others[name]) for name in sums)


def _are_close(one: float, other: float) -> bool:
    """Return whether two numbers are equal; sums of sums may differ from sums of batches in the last digits."""
    both = math.isnan(one) and math.isnan(other)
    return both or math.isclose(one, other, rel_tol=TINY, abs_tol=TINY)


def _sum_domains(record: Record) -> dict[tuple[int, str], float]:
    """Return the metrics of each domain, and the share kept of all."""
    domains: dict[int, list[Row]] = {}
    for row in record.rows:
        domains.setdefault(row.domain, []).append(row)
    found = {
        (number, name): value
        for number, rows in domains.items()
        for name, value in sum_metrics(rows).compute().items()
    }
    return found | {(-1, "kept"): record.kept()}


def make_diff_page(now: Reader, before: Reader, names: tuple[str, str]) -> Document:
    """Make the page of differences between two stores.

    Args:
        now: The store.
        before: The store that it is compared with.
        names: Names of the two files.
    """
    runs = compare_runs(now, before)
    ours, theirs = now.recipes(), before.recipes()
    shared = [name for name in ours if name in theirs]
    sections = [
        _compare_studies(Results(study(now, n)), Results(study(before, n)), k)
        for k, n in enumerate(shared, 1)
    ]
    sections.append(_runs_section(runs))
    only = [f"only in {names[0]}: {name}" for name in ours if name not in theirs]
    only += [f"only in {names[1]}: {name}" for name in theirs if name not in ours]
    notices = [Notice("Recipes " + "; ".join(only) + ".")] if only else []
    if not (runs.new or runs.removed or runs.changed or only):
        notices.append(
            Notice("No differences: both stores hold the same runs with the same rows.", good=True)
        )
    if runs.changed:
        text = "runs have the same key and different rows: the same spec gave other numbers"
        notices.append(Notice(f"{len(runs.changed)} {text}. See “Runs” for versions and devices."))
    return Document(
        f"What changed: {names[0]} against {names[1]}",
        [
            f"Now is {names[0]}, before is {names[1]}. Differences are now minus before, so a negative one means fewer "
            "errors or better calibration. Equal numbers are counted and not listed."
        ],
        sections,
        [
            (f"{len(runs.new):,}", "new runs"),
            (f"{len(runs.removed):,}", "removed runs"),
            (f"{len(runs.changed):,}", "runs with different rows"),
            (f"{runs.equal:,}", "equal runs"),
        ],
        [
            ("Now", f"{names[0]}: {', '.join(ours) or 'no recipes'}"),
            ("Before", f"{names[1]}: {', '.join(theirs) or 'no recipes'}"),
        ],
        notices,
        footer="Made by ttvd from the rows of both stores; this page needs no other file and no network.",
    )


@dataclass(frozen=True, eq=False)
class CellChange:
    """A line in a column, now and before."""

    line: Line
    column: Column
    now: Sequence[Run]
    before: Sequence[Run]

    @cached_property
    def error(self) -> Values:
        """Error now and before."""
        return _mean(self.now, "error"), _mean(self.before, "error")

    @cached_property
    def ece(self) -> Values:
        """ECE now and before."""
        return _mean(self.now, "ece"), _mean(self.before, "ece")

    @property
    def differs(self) -> bool:
        """Whether error or ECE changed."""
        return any(abs(now - before) > TINY for now, before in (self.error, self.ece))


def _mean(runs: Sequence[Run], metric: str) -> float:
    return fmean(run.totals[metric] for run in runs)


@dataclass(frozen=True, eq=False)
class LineChange:
    """A line over all columns that both stores have."""

    now: Line
    before: Line
    columns: Sequence[Column]

    def values(self, metric: str) -> Values | None:
        """Return the means now and before; None if one of them misses runs."""
        now, before = self.now.mean(metric, self.columns), self.before.mean(metric, self.columns)
        return None if now is None or before is None else (now, before)

    @property
    def differs(self) -> bool:
        """Whether error, ECE or the chosen setting changed."""
        values = [self.values(metric) for metric in ("error", "ece")]
        moved = any(pair is not None and abs(pair[0] - pair[1]) > TINY for pair in values)
        return moved or dict(self.now.parameters) != dict(self.before.parameters)


def _compare_studies(now: Results, before: Results, number: int) -> Section:
    recipe = now.study.recipe
    old = {(line.label, line.rule): line for line in before.lines}
    pairs = [(line, old[line.label, line.rule]) for line in now.lines if (line.label, line.rule) in old]
    columns = [column for column in now.columns if column in before.study.columns]
    cells = [
        CellChange(line, column, line.runs[column], other.runs[column])
        for line, other in pairs
        for column in columns
        if line.runs.get(column) and other.runs.get(column)
    ]
    changed = [cell for cell in cells if cell.differs]
    lines = [LineChange(line, other, columns) for line, other in pairs]
    moved = [line for line in lines if line.differs]
    equal = f"{len(lines) - len(moved)} of {len(lines)} lines and {len(cells) - len(changed)} of {len(cells)} cells"
    words = [f"{equal} (a line in a column) have the same error and ECE as before."]
    blocks: list[Block] = [Text([*words, *_list_unshared(now, before)])]
    if moved:
        blocks.append(Part("Lines", [_line_table(moved, f"{recipe.name}-lines")]))
    if changed:
        changed.sort(key=lambda cell: -abs(cell.error[0] - cell.error[1]))
        blocks.append(
            _fold_if_long("Cells, largest change first", _cell_table(changed, f"{recipe.name}-cells"))
        )
    if recipe.text != before.study.recipe.text:
        texts = before.study.recipe.text.splitlines(), recipe.text.splitlines()
        diff = "\n".join(difflib.unified_diff(*texts, "before", "now", lineterm="", n=2))
        blocks.append(Fold("The recipe changed", [Code(diff)]))
    return Section(recipe.title, f"study-{number}", blocks)


def _fold_if_long(title: str, table: Table) -> Block:
    if len(table.rows) <= LONG:
        return Part(title, [table])
    return Fold(title, [table], f"{len(table.rows)} rows")


def _list_unshared(now: Results, before: Results) -> list[str]:
    """Name the lines and columns that only one of the two studies has."""
    ours, theirs = [{(line.label, line.rule): r.name(line) for line in r.lines} for r in (now, before)]
    here = {column: column.label for column in now.study.columns}
    there = {column: column.label for column in before.study.columns}
    groups = [
        ("New lines", [name for key, name in ours.items() if key not in theirs]),
        ("Removed lines", [name for key, name in theirs.items() if key not in ours]),
        ("New columns", [name for key, name in here.items() if key not in there]),
        ("Removed columns", [name for key, name in there.items() if key not in here]),
    ]
    return [f"{title}: {', '.join(names)}." for title, names in groups if names]


def _runs_section(runs: RunChanges) -> Section:
    blocks: list[Block] = [Text([f"{runs.equal:,} runs are in both stores with the same rows."])]
    if runs.new or runs.removed:
        blocks.append(Part("New and removed", [_count_table(_count(runs.new), _count(runs.removed))]))
        for title, found in (("Keys of new runs", runs.new), ("Keys of removed runs", runs.removed)):
            if found:
                listing = "\n".join(_describe_run(run) for run in found)
                blocks.append(Fold(title, [Code(listing)], f"{len(found):,}"))
    if runs.changed:
        blocks.append(_fold_if_long("Same key, different rows", _changed_runs_table(runs.changed)))
    return Section("Runs", "runs", blocks)


def _count(runs: Iterable[Run]) -> Counter[tuple[str, str, str]]:
    return Counter((run.spec.method, run.spec.checkpoint, run.spec.data) for run in runs)


def _describe_run(run: Run) -> str:
    spec = run.spec
    return f"{spec.key}  {spec.method} on {spec.data}, {spec.domain_label}, seed {spec.seed}"


def _line_table(changes: Sequence[LineChange], name: str) -> Table:
    """Return a row for each line whose mean or setting changed."""
    rows = []
    for change in changes:
        before, now = _changed_settings(change)
        chosen = replace(rule_cell(change.now), note=now) if now else rule_cell(change.now)
        error, ece = _change_cells(change.values("error")), _change_cells(change.values("ece"))
        rows.append(
            [text_cell(change.now.label), chosen, text_cell(before), *error, _interval_cell(change), *ece]
        )
    headings: list[str | Heading] = [
        "method",
        Heading("chosen by", under="setting"),
        Heading("setting", "before"),
        *_CHANGE,
        Heading("95 % interval", "paired", under="verdict"),
        *_CHANGE,
    ]
    spans = [("", 3), ("error (%)", 4), ("ECE (%)", 3)]
    tags = [change.now.rule for change in changes]
    return Table(headings, rows, _CAPTION, spans, name=name, heads=True, tags=tags)


def _changed_settings(change: LineChange) -> tuple[str, str]:
    """Return the parameters that differ, before and now: those that a grid chose, or else those that were set."""
    if dict(change.now.parameters) != dict(change.before.parameters):
        return format_pairs(change.before.parameters), format_pairs(change.now.parameters)
    before, now = (_first_parameters(line, change.columns) for line in (change.before, change.now))
    names = [name for name in now if name != "seed" and name in before and now[name] != before[name]]
    return tuple(format_pairs({name: values[name] for name in names}) for values in (before, now))  # type: ignore[return-value]


def _first_parameters(line: Line, columns: Sequence[Column]) -> Mapping[str, Any]:
    runs = [run for column in columns for run in line.runs.get(column, ())]
    return runs[0].spec.parameters if runs else {}


def _cell_table(changes: Sequence[CellChange], name: str) -> Table:
    """Return a row for each line and column that changed."""
    rows = []
    for change in changes:
        words = [change.line.label, format_rule(change.line), change.column.label]
        before, now = (" ".join(run.spec.key[:8] for run in runs) for runs in (change.before, change.now))
        numbers = [*_change_cells(change.error), *_change_cells(change.ece)]
        rows.append([*map(text_cell, words), *numbers, text_cell(f"{before} → {now}")])
    keys = Heading("runs", "before → now, first digits")
    headings: list[str | Heading] = ["method", "chosen by", "column", *_CHANGE, *_CHANGE, keys]
    spans = [("", 3), ("error (%)", 3), ("ECE (%)", 3), ("", 1)]
    tags = [change.line.rule for change in changes]
    return Table(headings, rows, _CAPTION, spans, name=name, heads=True, tags=tags)


def _count_table(new: Counter[tuple[str, str, str]], removed: Counter[tuple[str, str, str]]) -> Table:
    """Return the number of new and removed runs of each method, model and data set."""
    rows = [
        [*map(text_cell, kind), *(Cell(f"{found[kind]}", found[kind]) for found in (new, removed))]
        for kind in sorted({*new, *removed})
    ]
    headings = ["method", "model", "data set", "new", "removed"]
    return Table(headings, rows, name="new-and-removed", heads=True)


def _changed_runs_table(pairs: Sequence[tuple[Run, Run]]) -> Table:
    """Return a row for each run with the same spec and different rows, with possible reasons."""
    rows = []
    for now, before in pairs:
        spec = now.spec
        words = [spec.key, spec.method, spec.domain_label, str(spec.seed)]
        error, ece = (_change_cells((now.totals[m], before.totals[m])) for m in ("error", "ece"))
        versions = [format_pairs(run.facts.versions) for run in (before, now)]
        devices = [f"{run.facts.device}, threads {run.facts.threads}" for run in (before, now)]
        facts = [_before_and_now(*versions), _before_and_now(*devices)]
        rows.append([*map(text_cell, words), *error, *ece, *facts])
    headings: list[str | Heading] = [
        *("run", "method", "column", "seed", *_CHANGE, *_CHANGE),
        Heading("versions", under="versions now"),
        Heading("device", under="device now"),
    ]
    spans = [("", 4), ("error (%)", 3), ("ECE (%)", 3), ("", 2)]
    return Table(headings, rows, _CAPTION, spans, name="changed-runs", heads=True)


def _before_and_now(before: str, now: str) -> Cell:
    return text_cell("the same", note=now) if before == now else text_cell(f"{before} → {now}")


def _change_cells(values: Values | None) -> list[Cell]:
    """Return the number before, now and the change, which has a sign and a colour."""
    if values is None:
        return [MISSING] * 3
    now, before = (100 * value for value in values)
    change = now - before
    tone = "" if abs(change) < 0.005 else "better" if change < 0 else "worse"
    text = f"{change:+.2f}" if abs(change) >= 0.005 else "0" if abs(change) < 100 * TINY else f"{change:+.0e}"
    return [Cell(f"{before:.2f}", before), Cell(f"{now:.2f}", now), Cell(text, change, tone=tone)]


def _interval_cell(change: LineChange) -> Cell:
    """Return the interval of the change in error, on streams that both stores have."""
    first, second = pair_records(
        [run for column in change.columns for run in change.now.runs.get(column, ())],
        [run for column in change.columns for run in change.before.runs.get(column, ())],
    )
    if not first or change.values("error") is None:
        return Cell("-", "", hint="the streams are not the same, or runs are missing")
    return interval_cell(paired_difference(first, second, draws=DRAWS), tie="no clear change")
