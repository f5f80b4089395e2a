"""What changed between two stores: runs that came, went or differ, and what that does to the tables."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ttvd.bench.packed import PackedRecord, has_batches
from ttvd.bench.run import sum_metrics
from ttvd.bench.study import study
from ttvd.report.diff_tables import (
    TINY,
    CellChange,
    LineChange,
    cell_table,
    changed_runs_table,
    count_table,
    line_table,
)
from ttvd.report.document import Block, Code, Document, Fold, Notice, Part, Section, Text
from ttvd.report.results import Results

if TYPE_CHECKING:
    from ttvd.bench.run import Record, Row
    from ttvd.bench.spec import Run
    from ttvd.bench.store import Reader
    from ttvd.bench.study import Column, Line
    from ttvd.report.page import Table

LONG = 30
"""Rows above which a table is folded."""


@dataclass(frozen=True)
class RunChanges:
    """The runs of two stores, by key.

    Attributes:
        new: Only in the first.
        gone: Only in the second.
        changed: In both, with other rows: now and before.
        equal: Number of those with the same rows.
    """

    new: Sequence[Run]
    gone: Sequence[Run]
    changed: Sequence[tuple[Run, Run]]
    equal: int


def compare_runs(now: Reader, before: Reader) -> RunChanges:
    """Match the runs of two stores by key; rows are equal when all but their times are."""
    ours, theirs = now.load(now.done()), before.load(before.done())
    both = sorted(set(ours) & set(theirs))
    changed = [(ours[key], theirs[key]) for key in both if not have_same_rows(ours[key], theirs[key])]
    new = [ours[key] for key in sorted(set(ours) - set(theirs))]
    gone = [theirs[key] for key in sorted(set(theirs) - set(ours))]
    return RunChanges(new, gone, changed, len(both) - len(changed))


def have_same_rows(one: Run, other: Run) -> bool:
    """Whether two runs gave the same rows, as far as both have them; how long they took does not count."""
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
    """Sums of sums may differ from sums of batches in their last digits."""
    both = math.isnan(one) and math.isnan(other)
    return both or math.isclose(one, other, rel_tol=TINY, abs_tol=TINY)


def _sum_domains(record: Record) -> dict[tuple[int, str], float]:
    """The metrics of each domain, and the share kept of all: what sums can tell."""
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
    """All that the page of differences holds.

    Args:
        now: The store.
        before: What it is compared with.
        names: Of the two files.
    """
    runs = compare_runs(now, before)
    ours, theirs = now.recipes(), before.recipes()
    shared = [name for name in ours if name in theirs]
    sections = [
        _compare_studies(Results(study(now, n)), Results(study(before, n)), k)
        for k, n in enumerate(shared, 1)
    ]
    sections.append(_list_runs(runs))
    only = [f"only in {names[0]}: {name}" for name in ours if name not in theirs]
    only += [f"only in {names[1]}: {name}" for name in theirs if name not in ours]
    notices = [Notice("Recipes " + "; ".join(only) + ".")] if only else []
    if not (runs.new or runs.gone or runs.changed or only):
        notices.append(
            Notice("No differences: both stores hold the same runs with the same rows.", good=True)
        )
    if runs.changed:
        text = "runs have the same key and other rows: the same question got another answer"
        notices.append(Notice(f"{len(runs.changed)} {text}. See “Runs” for versions and devices."))
    return Document(
        f"What changed: {names[0]} against {names[1]}",
        [
            f"Now is {names[0]}, before is {names[1]}. Differences are now minus before, so a negative one means fewer "
            "errors or better calibration. What is equal is counted and not listed."
        ],
        [
            (f"{len(runs.new):,}", "new runs"),
            (f"{len(runs.gone):,}", "runs gone"),
            (f"{len(runs.changed):,}", "runs with other rows"),
            (f"{runs.equal:,}", "equal runs"),
        ],
        [
            ("Now", f"{names[0]}: {', '.join(ours) or 'no recipes'}"),
            ("Before", f"{names[1]}: {', '.join(theirs) or 'no recipes'}"),
        ],
        notices,
        sections,
        footer="Made by ttvd from the rows of both stores; this page needs no other file and no network.",
    )


def _compare_studies(now: Results, before: Results, number: int) -> Section:
    recipe = now.study.recipe
    old = {(line.label, line.rule): line for line in before.lines}
    pairs = [(line, old[line.label, line.rule]) for line in now.lines if (line.label, line.rule) in old]
    columns = [column for column in now.columns if column in before.study.columns]
    cells = [found for line, other in pairs for found in _compare_cells(line, other, columns)]
    changed = [cell for cell in cells if cell.differs]
    lines = [LineChange(line, other, columns) for line, other in pairs]
    moved = [line for line in lines if line.differs]
    equal = f"{len(lines) - len(moved)} of {len(lines)} lines and {len(cells) - len(changed)} of {len(cells)} cells"
    words = [f"{equal} (a line in a column) have the same error and ECE as before."]
    words += _name_outsiders(now, before)
    blocks: list[Block] = [Text(words)]
    if moved:
        blocks.append(Part("Lines", [line_table(moved, f"{recipe.name}-lines")]))
    if changed:
        changed.sort(key=lambda cell: -abs(cell.error[0] - cell.error[1]))
        table = cell_table(changed, f"{recipe.name}-cells")
        blocks.append(_unfold("Cells, largest change first", table))
    if recipe.text != before.study.recipe.text:
        blocks.append(
            Fold("The recipe changed", [Code(_compare_texts(before.study.recipe.text, recipe.text))])
        )
    return Section(recipe.title, f"study-{number}", blocks)


def _unfold(title: str, table: Table) -> Block:
    """A short table is shown at once, a long one when it is asked for."""
    return (
        Part(title, [table]) if len(table.rows) <= LONG else Fold(title, [table], f"{len(table.rows)} rows")
    )


def _compare_cells(now: Line, before: Line, columns: Sequence[Column]) -> list[CellChange]:
    return [
        CellChange(now, column, now.runs[column], before.runs[column])
        for column in columns
        if now.runs.get(column) and before.runs.get(column)
    ]


def _name_outsiders(now: Results, before: Results) -> list[str]:
    """Lines and columns that only one of the two has."""
    ours, theirs = [{(line.label, line.rule): r.name(line) for line in r.lines} for r in (now, before)]
    here = {column: column.label for column in now.study.columns}
    there = {column: column.label for column in before.study.columns}
    groups = [
        ("New lines", [name for key, name in ours.items() if key not in theirs]),
        ("Lines gone", [name for key, name in theirs.items() if key not in ours]),
        ("New columns", [name for key, name in here.items() if key not in there]),
        ("Columns gone", [name for key, name in there.items() if key not in here]),
    ]
    return [f"{title}: {', '.join(names)}." for title, names in groups if names]


def _compare_texts(before: str, now: str) -> str:
    return "\n".join(
        difflib.unified_diff(before.splitlines(), now.splitlines(), "before", "now", lineterm="", n=2)
    )


def _list_runs(runs: RunChanges) -> Section:
    blocks: list[Block] = [Text([f"{runs.equal:,} runs are in both stores with the same rows."])]
    counts = _count_kinds(runs.new), _count_kinds(runs.gone)
    if runs.new or runs.gone:
        blocks.append(Part("New and gone", [count_table(*counts)]))
        for title, found in (("Keys of new runs", runs.new), ("Keys of gone runs", runs.gone)):
            if found:
                blocks.append(
                    Fold(title, [Code("\n".join(_name_run(run) for run in found))], f"{len(found):,}")
                )
    if runs.changed:
        blocks.append(_unfold("Same key, other rows", changed_runs_table(runs.changed)))
    return Section("Runs", "runs", blocks)


def _count_kinds(runs: Iterable[Run]) -> Counter[tuple[str, str, str]]:
    return Counter((run.spec.method, run.spec.checkpoint, run.spec.data) for run in runs)


def _name_run(run: Run) -> str:
    spec = run.spec
    return f"{spec.key}  {spec.method} on {spec.data}, {spec.domain_label}, seed {spec.seed}"
