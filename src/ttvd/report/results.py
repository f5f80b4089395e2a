"""The numbers of a study as tables and figures need them, and the texts that explain them."""

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
LABEL_USE = {"last": 0, "validation": 0, "grid-best": 1, "oracle": 2}
"""How a rule of selection uses labels of the reported data: not at all, to choose a setting, or for each batch."""


@dataclass(frozen=True)
class Metric:
    """A metric that tables show.

    Attributes:
        name: Name of the metric in ``RunningMetrics.compute``.
        title: Title for headings.
        scale: Factor for readers: 100 for shares.
        digits: Digits after the point in tables with many columns.
        note: Small print for headings.
        signed: Whether it is a difference, which is shown with its sign.
    """

    name: str
    title: str
    scale: float = 100.0
    digits: int = 1
    note: str = ""
    signed: bool = False


ERROR = Metric("error", "error (%)")
ECE = Metric("ece", "ECE (%)", note="over the stream")
BATCH_ECE = Metric("batch_ece", "batch ECE (%)", note="as some papers report it")
NLL = Metric("nll", "NLL", 1.0, 2, "nats")
BRIER = Metric("brier", "Brier", 1.0, 3)
POINTS = Metric("error", "points", signed=True)
METRICS = (ERROR, ECE, NLL, BRIER)

GLOSSARY = (
    ("error", "Share of the images that are classified wrongly, over the whole stream. Lower is better."),
    (
        "ECE",
        "Expected calibration error over the whole stream, 15 bins: how far confidence and accuracy are apart. A "
        "method that says 80 % and is right in 80 % of these cases has an ECE of zero.",
    ),
    (
        "batch ECE",
        "The mean of the ECEs of single batches, as some papers report it. It is too high for small batches, even for "
        "a perfectly calibrated method: use it to compare with those papers and for nothing else.",
    ),
    ("NLL", "Mean negative log-probability of the true class, in nats."),
    ("Brier", "Squared distance between the probabilities and the truth, summed over classes; from 0 to 2."),
    (
        "ms per image",
        "Median time of a batch divided by its size: prediction and adaptation, including the device.",
    ),
    ("kept", "Share of the images that took part in gradient steps; methods without steps have none."),
    (
        "±",
        "Standard deviation over seeds. A seed decides the order of the stream and the random parts of the method; the "
        "source model and the corrupted images stay the same, so it says nothing about other models or images.",
    ),
    (
        "†",
        "Some runs are missing: the number is the mean of the seeds that have all runs, and is never marked as best.",
    ),
)

RULES = {
    "last": "One fixed setting. No labels are needed: this can be deployed.",
    "validation": "The setting of the grid with the lowest mean error on corruptions that are held out for this and "
    "not reported. No labels of the reported data are used: this can be deployed.",
    "grid-best": "The setting of the grid with the lowest mean error on the reported data itself, as in many papers. "
    "It has used the test labels, so it is too optimistic, most of all for large grids.",
    "oracle": "Several steps on each batch, of which the labels of the batch choose the best, as TTAB defines it; "
    "the test labels also choose the setting of a grid. It shows what labels could gain on a batch, is never a result "
    "and cannot be the best of a column. It may reset before each batch and use fewer images than the other lines; "
    "then it is not a bound for them.",
}
"""Rules of selection and what they do."""


@dataclass(frozen=True)
class Value:
    """A mean over seeds.

    Attributes:
        mean: Mean over the seeds that have all runs.
        spread: Standard deviation over these seeds; None for a single seed.
        complete: Whether every seed of the line has all runs.
    """

    mean: float
    spread: float | None
    complete: bool


@dataclass(frozen=True, eq=False)
class Results:
    """A study and its numbers.

    Attributes:
        study: Lines, columns and runs.
        number: Number of the study on its page; part of the anchors.
    """

    study: Study
    number: int = 1

    @cached_property
    def lines(self) -> list[Line]:
        """Lines that use no labels first and oracles last; otherwise in the order of the recipe."""
        return sorted(self.study.lines, key=lambda line: LABEL_USE[line.rule])

    @cached_property
    def columns(self) -> list[Column]:
        """Columns by condition; corruptions in the order of the published tables, other domains as in the recipe."""
        conditions = self.study.conditions()
        return sorted(self.study.columns, key=lambda c: (conditions.index(c.condition), _place(c.domain)))

    def conditions(self) -> dict[str, list[Column]]:
        """Return the columns of each condition; one entry without a name if only the domain varies."""
        found: dict[str, list[Column]] = {}
        for column in self.columns:
            found.setdefault(format_condition(column.condition), []).append(column)
        return found

    def runs(self, line: Line, columns: Iterable[Column] | None = None, *, fresh: bool = False) -> list[Run]:
        """Return the runs of a line, column by column; on request with the fresh starts of its onsets."""
        wanted = list(self.columns if columns is None else columns)
        groups = [line.runs, line.fresh] if fresh else [line.runs]
        return [run for group in groups for column in wanted for run in group.get(column, ())]

    def all_runs(self) -> list[Run]:
        """Return the runs of all lines; a run that several lines share is listed once."""
        return list({id(run): run for line in self.lines for run in self.runs(line)}.values())

    def value(self, line: Line, columns: Sequence[Column], metric: str) -> Value | None:
        """Return the mean over columns and seeds; None if no seed has all columns."""
        mean = line.mean(metric, columns)
        if mean is None:
            return None
        seeds = {run.spec.seed for run in self.runs(line)}
        return Value(mean, line.spread(metric, columns), len(line.seeds(columns)) == len(seeds))

    def error(self, line: Line) -> float | None:
        """Return the mean error over all columns."""
        return line.mean("error", self.columns)

    def milliseconds(self, line: Line) -> float | None:
        """Return the time for each image, prediction and adaptation; the median over runs."""
        times = [
            1000 * run.record.seconds_per_batch() / float(run.record.sizes().median())
            for run in self.runs(line)
        ]
        return statistics.median(times) if times else None

    def kept(self, line: Line) -> float | None:
        """Return the share of samples that took part in gradient steps; None for lines without steps."""
        shares = [run.record.kept() for run in self.runs(line) if run.facts.backwards > 0]
        return statistics.fmean(shares) if shares else None

    def reliability(self, line: Line) -> Reliability | None:
        """Return confidence and accuracy over all runs of a line together."""
        rows = [row for run in self.runs(line) for row in run.record.rows]
        return sum_metrics(rows).reliability() if rows else None

    def name(self, line: Line) -> str:
        """Return the label of a line, with its rule if another line has the same label."""
        same = [other for other in self.lines if other.label == line.label]
        return line.label if len(same) == 1 else f"{line.label} ({line.rule})"

    def anchor(self, line: Line, column: Column | None = None) -> str:
        """Return the anchor of the place on the page that lists the runs of a line, or of a line in a column."""
        anchor = f"s{self.number}-l{self.lines.index(line) + 1}"
        return anchor if column is None else f"{anchor}-c{self.study.columns.index(column) + 1}"

    def reference(self, line: Line, label: str | None = None) -> Line | None:
        """Return the line to compare with: the one of that label under the same rule, else its first one."""
        named = [other for other in self.lines if other.label == (label or self.study.reference())]
        same = [other for other in named if other.rule == line.rule]
        found = (same or named or [line])[0]
        return None if found is line or found.label == line.label else found


def chosen_without_labels(line: Line) -> bool:
    """Return whether the setting of a line was chosen without labels of the reported data."""
    return LABEL_USE[line.rule] == 0 or (line.rule == "grid-best" and line.tried == 1)


def count(number: int, noun: str) -> str:
    """Format a number with its noun.

    Example:
        >>> count(1, "run"), count(2, "run")
        ('1 run', '2 runs')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_rule(line: Line) -> str:
    """Format the rule of selection and the number of settings that it compared."""
    return f"{line.rule} of {line.tried}" if line.tried > 1 else line.rule


def format_condition(condition: Iterable[tuple[str, Any]]) -> str:
    """Format what distinguishes a column beside its domain.

    Example:
        >>> format_condition([("batch_size", 8), ("sites", 0.05)])
        'batch size 8, class means from 5 % of the source data'
    """
    words = [
        f"class means from {100 * value:g} % of the source data"
        if name == "sites"
        else format_pairs({name: value})
        for name, value in condition
    ]
    return ", ".join(words)


def format_pairs(pairs: Mapping[str, Any]) -> str:
    """Format names and values in one line.

    Example:
        >>> format_pairs({"batch_size": 8, "lr": 1e-05, "reset": True, "order": "iid"})
        'batch size 8, lr 1e-05, reset yes, order iid'
    """
    return ", ".join(f"{name.replace('_', ' ')} {format_value(value)}" for name, value in pairs.items())


def format_value(value: Any) -> str:
    """Format a value for readers.

    Example:
        >>> format_value(0.5), format_value(None), format_value({"prior": 0.5, "count": None})
        ('0.5', 'none', 'prior 0.5')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return format_pairs({name: item for name, item in value.items() if item is not None}) or "none"
    return "none" if value is None else str(value)


def split_severity(domain: str) -> tuple[str, str]:
    """Split the label of a domain into corruption and severity.

    Example:
        >>> split_severity("gaussian noise 5"), split_severity("clean")
        (('gaussian noise', '5'), ('clean', ''))
    """
    name, _, severity = domain.rpartition(" ")
    return (name, severity) if severity.isdigit() else (domain, "")


def _place(domain: str) -> int:
    """Return the place of a corruption in the published tables: clean images come first, others last."""
    return -1 if domain == "clean" else PLACES.get(split_severity(domain)[0], len(PLACES))
