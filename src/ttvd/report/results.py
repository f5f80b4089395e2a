"""The numbers of a study, as tables and pictures need them, and the words for its lines and columns."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ttvd.bench.run import sum_metrics
from ttvd.data.corruptions import CORRUPTIONS, EXTRA

if TYPE_CHECKING:
    from ttvd.bench.spec import Run
    from ttvd.bench.study import Column, Line, Study
    from ttvd.metrics import Reliability

PLACES = {name.replace("_", " "): place for place, name in enumerate((*CORRUPTIONS, *EXTRA))}
TIERS = {"last": 0, "validation": 0, "grid-best": 1, "oracle": 2}
"""How much a rule knows of the labels of the data it reports on: nothing, which setting is best, everything."""


@dataclass(frozen=True)
class Metric:
    """A number that tables show.

    Attributes:
        name: As ``RunningMetrics.compute`` calls it.
        title: In headings.
        scale: What it is multiplied with for readers: 100 for shares.
        digits: Behind the point, in tables with many columns.
        note: Small print for headings.
    """

    name: str
    title: str
    scale: float = 100.0
    digits: int = 1
    note: str = ""


ERROR = Metric("error", "error (%)")
ECE = Metric("ece", "ECE (%)", note="over the stream")
BATCH_ECE = Metric("batch_ece", "batch ECE (%)", note="as some papers report it")
NLL = Metric("nll", "NLL", 1.0, 2, "nats")
BRIER = Metric("brier", "Brier", 1.0, 3)
METRICS = (ERROR, ECE, NLL, BRIER)


@dataclass(frozen=True)
class Value:
    """A mean over seeds.

    Attributes:
        mean: Over the seeds that have all runs.
        spread: Standard deviation over them, where there are several.
        whole: Whether no seed of the line was left out.
    """

    mean: float
    spread: float | None
    whole: bool


@dataclass(frozen=True, eq=False)
class Results:
    """A study and its numbers.

    Attributes:
        study: Lines, columns and runs.
        number: Of the study on its page; part of the names that links lead to.
    """

    study: Study
    number: int = 1

    @cached_property
    def lines(self) -> list[Line]:
        """Those that saw no labels first, oracles last; else as in the recipe."""
        return sorted(self.study.lines, key=lambda line: TIERS[line.rule])

    @cached_property
    def columns(self) -> list[Column]:
        """Condition by condition, corruptions in the order of the published tables; others keep their order."""
        conditions = self.study.conditions()
        return sorted(self.study.columns, key=lambda c: (conditions.index(c.condition), _place(c.domain)))

    def conditions(self) -> dict[str, list[Column]]:
        """The columns of each condition; a single entry without a name where nothing but the domain varies."""
        found: dict[str, list[Column]] = {}
        for column in self.columns:
            found.setdefault(show_condition(column.condition), []).append(column)
        return found

    def runs(self, line: Line, columns: Iterable[Column] | None = None) -> list[Run]:
        """The runs of a line, column by column."""
        wanted = self.columns if columns is None else columns
        return [run for column in wanted for run in line.runs.get(column, ())]

    def all_runs(self) -> list[Run]:
        """The runs of all lines; one that serves several lines comes once."""
        return list({id(run): run for line in self.lines for run in self.runs(line)}.values())

    def value(self, line: Line, columns: Sequence[Column], metric: str) -> Value | None:
        """Mean over columns and seeds; None where no seed has all columns."""
        mean = line.mean(metric, columns)
        if mean is None:
            return None
        seeds = {run.spec.seed for run in self.runs(line)}
        return Value(mean, line.spread(metric, columns), len(line.seeds(columns)) == len(seeds))

    def error(self, line: Line) -> float | None:
        """Mean error over all columns."""
        return line.mean("error", self.columns)

    def milliseconds(self, line: Line) -> float | None:
        """For each image: prediction and adaptation, the median over runs."""
        times = [
            1000 * run.record.seconds_per_batch() / float(run.record.sizes().median())
            for run in self.runs(line)
        ]
        return statistics.median(times) if times else None

    def kept(self, line: Line) -> float | None:
        """Share of the samples that took part in the steps; None for lines that take none."""
        shares = [run.record.kept() for run in self.runs(line) if run.facts.backwards > 0]
        return statistics.fmean(shares) if shares else None

    def reliability(self, line: Line) -> Reliability | None:
        """Confidence and accuracy over all runs of a line together."""
        rows = [row for run in self.runs(line) for row in run.record.rows]
        return sum_metrics(rows).reliability() if rows else None

    def name(self, line: Line) -> str:
        """The label, with the rule where another line has the same label."""
        same = [other for other in self.lines if other.label == line.label]
        return line.label if len(same) == 1 else f"{line.label} ({line.rule})"

    def anchor(self, line: Line, column: Column | None = None) -> str:
        """Name of the place where the page tells about the runs of a line, or of a line in a column."""
        anchor = f"s{self.number}-l{self.lines.index(line) + 1}"
        return anchor if column is None else f"{anchor}-c{self.study.columns.index(column) + 1}"

    def reference(self, line: Line, label: str | None = None) -> Line | None:
        """What a line is compared with: the line of that label under the same rule, else its first one."""
        named = [other for other in self.lines if other.label == (label or self.study.reference())]
        same = [other for other in named if other.rule == line.rule]
        found = (same or named or [line])[0]
        return None if found is line or found.label == line.label else found


def is_honest(line: Line) -> bool:
    """Whether a line's setting was chosen without labels of the data that it is reported on."""
    return TIERS[line.rule] == 0 or (line.rule == "grid-best" and line.tried == 1)


def count(number: int, noun: str) -> str:
    """A number of things.

    Example:
        >>> count(1, "run"), count(2, "run")
        ('1 run', '2 runs')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def show_rule(line: Line) -> str:
    """The rule of selection, and among how many settings it chose.

    In tables it always stands beside a line's name.
    """
    return f"{line.rule} of {line.tried}" if line.tried > 1 else line.rule


def show_condition(condition: Iterable[tuple[str, Any]]) -> str:
    """What distinguishes a column beside its domain, in words.

    Example:
        >>> show_condition([("batch_size", 8), ("sites", 0.05)])
        'batch size 8, class means from 5 % of the source data'
    """
    words = [
        f"class means from {100 * value:g} % of the source data"
        if name == "sites"
        else show_pairs({name: value})
        for name, value in condition
    ]
    return ", ".join(words)


def show_pairs(pairs: Mapping[str, Any]) -> str:
    """Names and values in a line.

    Example:
        >>> show_pairs({"batch_size": 8, "lr": 1e-05, "reset": True, "order": "iid"})
        'batch size 8, lr 1e-05, reset yes, order iid'
    """
    return ", ".join(f"{name.replace('_', ' ')} {show_value(value)}" for name, value in pairs.items())


def show_value(value: Any) -> str:
    """A value as people write it.

    Example:
        >>> show_value(0.5), show_value(None), show_value({"prior": 0.5, "count": None})
        ('0.5', 'none', 'prior 0.5')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return show_pairs({name: item for name, item in value.items() if item is not None}) or "none"
    return "none" if value is None else str(value)


def split_severity(domain: str) -> tuple[str, str]:
    """The corruption and the severity of a domain's label.

    Example:
        >>> split_severity("gaussian noise 5"), split_severity("clean")
        (('gaussian noise', '5'), ('clean', ''))
    """
    name, _, severity = domain.rpartition(" ")
    return (name, severity) if severity.isdigit() else (domain, "")


def _place(domain: str) -> int:
    """Of a corruption in the published tables; clean images before them, others after them."""
    return -1 if domain == "clean" else PLACES.get(split_severity(domain)[0], len(PLACES))
