"""Who beats whom: each line against a reference on the same streams, with paired intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ttvd.bench.compare import Interval, paired_difference
from ttvd.report.page import MISSING, Cell, Heading, Table
from ttvd.report.tables import LINE_HEADINGS, rule_cell, title_cell

if TYPE_CHECKING:
    from ttvd.bench.run import Record
    from ttvd.bench.spec import Run
    from ttvd.bench.study import Line
    from ttvd.report.results import Results

DRAWS = 2000


@dataclass(frozen=True)
class Duel:
    """A line against its reference.

    Attributes:
        line: The line.
        reference: What it is compared with.
        total: Difference in error over all streams that both saw; negative: the line is better.
        verdicts: For each column that both have: ``"better"``, ``"worse"`` or ``"tie"``.
        unpaired: Runs of the line that the reference has no twin for: none, or one that saw another stream.
    """

    line: Line
    reference: Line
    total: Interval | None
    verdicts: tuple[str, ...]
    unpaired: int


def hold_duels(results: Results, label: str | None = None) -> list[Duel]:
    """Every line against the reference.

    Args:
        results: Whose lines.
        label: Of the reference; the recipe's unless given.

    Raises:
        ValueError: No line has that label.
    """
    labels = {line.label for line in results.lines}
    if label is not None and label not in labels:
        raise ValueError(f"no line is called {label!r}; there are: {', '.join(sorted(labels))}")
    pairs = [(line, results.reference(line, label)) for line in results.lines]
    return [_fight(results, line, other) for line, other in pairs if other is not None]


def _fight(results: Results, line: Line, reference: Line) -> Duel:
    verdicts, ours, theirs, unpaired = [], [], [], 0
    for column in results.columns:
        first, second = pair_records(line.runs.get(column, ()), reference.runs.get(column, ()))
        unpaired += len(line.runs.get(column, ())) - len(first)
        if first:
            verdicts.append(paired_difference(first, second, draws=DRAWS).verdict)
        ours += first
        theirs += second
    total = paired_difference(ours, theirs, draws=DRAWS) if ours else None
    return Duel(line, reference, total, tuple(verdicts), unpaired)


def pair_records(runs: Sequence[Run], others_: Sequence[Run]) -> tuple[list[Record], list[Record]]:
    """Records on the same streams: the order of the samples and the sizes of the batches must agree."""
    others = {run.facts.order: run.record for run in others_}
    pairs = [
        (run.record, others[run.facts.order])
        for run in runs
        if run.facts.order in others
        and run.record.sizes().tolist() == others[run.facts.order].sizes().tolist()
    ]
    return [one for one, _ in pairs], [other for _, other in pairs]


def duel_table(results: Results, duels: list[Duel]) -> Table:
    """A row for each duel: the difference, its interval, and wins, ties and losses over the columns."""
    rows = []
    for duel in duels:
        link = f"#{results.anchor(duel.line)}"
        counts = [duel.verdicts.count(verdict) for verdict in ("better", "tie", "worse")]
        numbers = [Cell(str(count), count, link=link) for count in counts]
        other = results.name(duel.reference)
        against = Cell(other, other, link=f"#{results.anchor(duel.reference)}")
        total = duel.total
        change, range_ = MISSING, MISSING
        if total is not None:
            change = Cell(f"{100 * total.difference:+.2f}", 100 * total.difference, link=link)
            text = f"{100 * total.low:+.2f} to {100 * total.high:+.2f}"
            range_ = Cell(text, 100 * total.low, note=_WORDS[total.verdict], link=link)
        rows.append([title_cell(results, duel.line), rule_cell(duel.line), against, change, range_, *numbers])
    headings: list[str | Heading] = [
        *LINE_HEADINGS,
        "against",
        Heading("difference", "points of error"),
        Heading("95 % interval", "paired", under="verdict"),
        "better",
        "tie",
        "worse",
    ]
    tags = [duel.line.rule for duel in duels]
    return Table(
        headings, rows, name=f"{results.study.recipe.name}-paired", heads=True, tags=tags,
        spans=[("", 5), ("columns in which it is", 3)],
    )  # fmt: skip


_WORDS = {"better": "fewer errors", "worse": "more errors", "tie": "no clear difference"}
