"""Who beats whom: each line against a reference on the same streams, with paired intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch

from ttvd.bench.compare import Interval
from ttvd.bench.packed import has_batches
from ttvd.bench.run import Record
from ttvd.report.page import MISSING, Cell, Heading, Table
from ttvd.report.tables import LINE_HEADINGS, rule_cell, title_cell

if TYPE_CHECKING:
    from ttvd.bench.spec import Run
    from ttvd.bench.study import Line
    from ttvd.report.results import Results

Pair = tuple[list[Record], list[Record]]
DRAWS, LEVEL = 2000, 0.95


@dataclass(frozen=True)
class PairedComparison:
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


def hold_duels(results: Results, label: str | None = None) -> list[PairedComparison]:
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
    pairs = [(line, other) for line in results.lines if (other := results.reference(line, label)) is not None]
    matched = [
        [pair_records(line.runs.get(c, ()), other.runs.get(c, ())) for c in results.columns]
        for line, other in pairs
    ]
    single = iter(compare_all([pair for columns in matched for pair in columns]))
    total = compare_all([_join(columns) for columns in matched])
    comparisons = []
    for (line, other), columns, whole in zip(pairs, matched, total, strict=True):
        verdicts = tuple(found.verdict for found in islice(single, len(columns)) if found is not None)
        unpaired = len(results.runs(line)) - sum(len(ours) for ours, _ in columns)
        comparisons.append(PairedComparison(line, other, whole, verdicts, unpaired))
    return comparisons


def _join(columns: Sequence[Pair]) -> Pair:
    ours, theirs = ([record for pair in columns for record in pair[side]] for side in (0, 1))
    return ours, theirs


def compare_all(pairs: Sequence[Pair]) -> list[Interval | None]:
    """What ``paired_difference`` says of each pair, None of an empty one, with draws that are made once for all.

    The draws depend on nothing but the numbers of batches, so pairs that agree in these share them: with many lines
    that is nearly all of the work.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, (first, _) in enumerate(pairs):
        groups.setdefault(tuple(len(record.sizes()) for record in first), []).append(number)
    found: list[Interval | None] = [None] * len(pairs)
    for batches, members in groups.items():
        if batches:
            for number, interval in zip(members, _compare([pairs[n] for n in members], batches), strict=True):
                found[number] = interval
    return found


def _compare(pairs: Sequence[Pair], batches: Sequence[int]) -> list[Interval]:
    """Intervals of pairs whose streams have the same numbers of batches."""
    generator = torch.Generator().manual_seed(0)
    sums = torch.zeros(DRAWS, len(pairs), dtype=torch.float64)
    total, count = torch.zeros(2, len(pairs), dtype=torch.float64)
    for place, number in enumerate(batches):
        picks = torch.randint(number, (DRAWS, number), generator=generator)
        times = torch.zeros(DRAWS, number, dtype=torch.float64)
        times.scatter_add_(1, picks, torch.ones((), dtype=torch.float64).expand_as(picks))
        gaps = torch.stack([one[place].wrong() - other[place].wrong() for one, other in pairs], dim=1)
        sums += times @ gaps  # whole numbers: the sum is the same in any order
        total += gaps.sum(0)
        count += torch.stack([one[place].sizes().sum() for one, _ in pairs])
    edges = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    ends = [(sums[:, k] / count[k]).quantile(edges).tolist() for k in range(len(pairs))]
    return [Interval(middle, *end) for middle, end in zip((total / count).tolist(), ends, strict=True)]


def pair_records(runs: Sequence[Run], others_: Sequence[Run]) -> Pair:
    """Records on the same streams: the order of the samples and the sizes of the batches must agree.

    Runs of which only sums are known have no batches that could be compared.
    """
    others = {run.facts.order: run.record for run in others_ if has_batches(run)}
    pairs = [
        (run.record, others[run.facts.order])
        for run in runs
        if has_batches(run)
        and run.facts.order in others
        and run.record.sizes().tolist() == others[run.facts.order].sizes().tolist()
    ]
    return [one for one, _ in pairs], [other for _, other in pairs]


def duel_table(results: Results, comparisons: list[PairedComparison]) -> Table:
    """A row for each comparison: the difference, its interval, and wins, ties and losses over the columns."""
    rows = []
    for comparison in comparisons:
        link = f"#{results.anchor(comparison.line)}"
        counts = [comparison.verdicts.count(verdict) for verdict in ("better", "tie", "worse")]
        numbers = [Cell(str(count), count, link=link) for count in counts]
        other = results.name(comparison.reference)
        against = Cell(other, other, link=f"#{results.anchor(comparison.reference)}")
        total = comparison.total
        change, range_ = MISSING, MISSING
        if total is not None:
            change = Cell(f"{100 * total.difference:+.2f}", 100 * total.difference, link=link)
            text = f"{100 * total.low:+.2f} to {100 * total.high:+.2f}"
            range_ = Cell(text, 100 * total.low, note=_WORDS[total.verdict], link=link)
        rows.append(
            [
                title_cell(results, comparison.line),
                rule_cell(comparison.line),
                against,
                change,
                range_,
                *numbers,
            ]
        )
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
    return Table(
        headings, rows, name=f"{results.study.recipe.name}-paired", heads=True, tags=tags,
        spans=[("", 5), ("columns in which it is", 3)],
    )  # fmt: skip


_WORDS = {"better": "fewer errors", "worse": "more errors", "tie": "no clear difference"}
