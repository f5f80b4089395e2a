"""The figures of a study, each with what to see in it; of many lines only some are drawn, and the page says which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ttvd.bench.store.packed import PackedRecord, has_batches
from ttvd.report.charts import SCORES, Point, plot_differences, plot_kept, plot_scores, plot_tradeoff
from ttvd.report.curves import plot_curves, plot_reliability
from ttvd.report.page import Exhibit, Panel, Strip, encode
from ttvd.report.results import count, is_honest
from ttvd.report.style import line_colours, new_panel

if TYPE_CHECKING:
    from ttvd.bench.study import Column, Line
    from ttvd.report.comparisons import PairedComparison
    from ttvd.report.results import Results

MOST = 8
CONTROLS = ("source", "bn")
"""Methods without gradient steps, against which the others must show what steps are good for."""

WIDE, SMALL = (5.6, 4.2), (3.4, 2.6)
POINTS, TALL = 200, 20
FEW = 30
"""Batches of a stream below which a bootstrap over them is too sure of itself."""


def pick_lines(results: Results, reference: str | None = None) -> list[Line]:
    """At most eight lines for pictures: one rule for each label, the reference, the controls and the best others."""
    choices: dict[str, Line] = {}
    for line in results.lines:
        if line.rule != "oracle" and results.error(line) is not None:
            known = choices.get(line.label)
            if known is None or (is_honest(line) and not is_honest(known)):
                choices[line.label] = line
    ranked = sorted(choices.values(), key=lambda line: results.error(line) or 0.0)
    label = reference or results.study.reference()
    first = [line for line in ranked if line.label == label or line.method in CONTROLS]
    best = [line for line in ranked if line not in first]
    chosen = {id(line) for line in [*first, *best][:MOST]}
    return [line for line in choices.values() if id(line) in chosen]


def give_colours(results: Results, lines: Sequence[Line]) -> dict[str, str]:
    """The same colour for a line in all pictures; the reference has the first one."""
    reference = results.study.reference()
    labels = sorted((line.label for line in lines), key=lambda label: label != reference)
    return line_colours(labels)


def explain_choice(results: Results, lines: Sequence[Line]) -> str:
    """Which lines are drawn, where not all are."""
    total = len({line.label for line in results.lines})
    several = len(results.lines) > total
    rule = (
        " Where a line has several rules of selection, the one without test labels is drawn."
        if several
        else ""
    )
    if total > len(lines):
        what = "the reference, the controls and those with the lowest error"
        return f"Drawn are {len(lines)} of {total} lines: {what}.{rule}"
    return rule.strip()


def show_stream(results: Results, lines: Sequence[Line]) -> Exhibit | None:
    """Error so far and share kept along the stream, over all columns."""
    curves = {line.label: mean_curve(results, line, results.columns, "error") for line in lines}
    drawn = {name: curve for name, curve in curves.items() if curve is not None}
    if not drawn:
        return None
    batches = count_batches(results, lines, results.columns)
    panels = [
        _draw_curves(
            drawn, give_colours(results, lines), "all columns", WIDE, batches, results.study.reference()
        )
    ]
    learning = [line for line in lines if results.kept(line) is not None]
    kept = {line.label: mean_curve(results, line, results.columns, "kept") for line in learning}
    picky = {name: curve for name, curve in kept.items() if curve is not None and float(curve.min()) < 0.999}
    if picky:
        ax = plot_kept(picky, new_panel(WIDE), colours=give_colours(results, lines), batches=batches)
        ax.set_title("samples kept")
        panels.append(
            Panel(encode(ax), "Share of each batch that took part in the steps, for " + ", ".join(picky))
        )
    caption = (
        "Left: the error over all samples seen so far, mean over columns and seeds; a method that learns goes down. "
        "The number at the end of a line is its final error; an arrow says that the line is above the picture."
        + (" Right: the share of each batch that a method trusts enough to learn from." if picky else "")
    )
    return Exhibit("Along the stream", caption, [Strip(panels, 2)], details=explain_choice(results, lines))


def show_each_stream(results: Results, lines: Sequence[Line]) -> Exhibit | None:
    """The curves of each column; of each condition, where there are several."""
    conditions = results.conditions()
    groups = conditions if len(conditions) > 1 else {column.label: [column] for column in results.columns}
    panels, colours = [], give_colours(results, lines)
    for title, columns in groups.items():
        found = {line.label: mean_curve(results, line, columns, "error") for line in lines}
        curves = {name: curve for name, curve in found.items() if curve is not None}
        if curves:
            batches = count_batches(results, lines, columns)
            panels.append(_draw_curves(curves, colours, title, SMALL, batches))
    if not panels:
        return None
    key = [(colour, name) for name, colour in colours.items()]
    caption = "Error over all samples seen so far against batches seen, mean over seeds."
    return Exhibit("Adaptation curves", caption, [Strip(panels, 3)], key)


def _draw_curves(
    curves: Mapping[str, npt.NDArray[np.float64]],
    colours: Mapping[str, str],
    title: str,
    size: tuple[float, float],
    batches: int,
    strong: str | None = None,
) -> Panel:
    bottom, top = choose_range(list(curves.values()))
    look: Any = {
        "top": top,
        "bottom": bottom,
        "strong": strong,
        "named": strong is not None,
        "colours": colours,
        "batches": batches,
    }
    ax = plot_curves(curves, new_panel(size), **look)
    ax.set_title(title)
    ends = ", ".join(f"{name} {curve[-1]:.1%}" for name, curve in curves.items())
    return Panel(encode(ax), f"Error so far, {title}; at the end: {ends}")


def choose_range(curves: Sequence[npt.NDArray[np.float64]]) -> tuple[float, float]:
    """Errors to show: not the first batches, whose noise is large, nor lines far above the others."""
    highs = sorted(float(curve[len(curve) // 8 :].max()) for curve in curves)
    low = min(float(curve[len(curve) // 8 :].min()) for curve in curves)
    usual = highs[len(highs) // 2]
    high = max(value for value in highs if value - low <= 2 * (usual - low) or value == usual)
    room = 0.12 * (high - low) + 0.005
    return max(0.0, low - room), min(1.0, high + room)


def mean_curve(
    results: Results, line: Line, columns: Sequence[Column], what: str
) -> npt.NDArray[np.float64] | None:
    """The mean of what the runs say batch by batch; None unless all are of the same length."""
    runs = results.runs(line, columns)
    if not runs or len({len(run.record.sizes()) for run in runs}) != 1 or not all(map(has_batches, runs)):
        return None
    if what == "kept" and any(isinstance(run.record, PackedRecord) for run in runs):
        return None
    curves = [
        run.record.curve()
        if what == "error"
        else torch.tensor([row.kept for row in run.record.rows]).double()
        for run in runs
    ]
    return _thin(torch.stack(curves).mean(0)).numpy()


def count_batches(results: Results, lines: Sequence[Line], columns: Sequence[Column]) -> int:
    """How many batches the longest streams of lines have; :func:`mean_curve` may have fewer points."""
    return max(len(run.record.sizes()) for line in lines for run in results.runs(line, columns))


def _thin(curve: Tensor) -> Tensor:
    """Means over neighbours where a curve has more points than a picture can show."""
    step = -(-len(curve) // POINTS)
    return curve if step == 1 else torch.stack([part.mean() for part in curve.split(step)])


def show_tradeoffs(results: Results, lines: Sequence[Line]) -> Exhibit | None:
    """Error against cost, and error against calibration, of all lines that do not see labels batch by batch."""
    shown = [line for line in _one_for_each_label(results, lines) if results.error(line) is not None]
    if not shown:
        return None
    colours = give_colours(results, lines)
    errors = {line.label: 100 * (results.error(line) or 0.0) for line in shown}
    costs = [Point(line.label, results.milliseconds(line) or 0.0, errors[line.label]) for line in shown]
    gaps = {line.label: 100 * (line.mean("ece", results.columns) or 0.0) for line in shown}
    eces = [Point(label, errors[label], gaps[label]) for label in errors]
    left = plot_tradeoff(costs, new_panel(WIDE), colours=colours, log=True)
    left.set(xlabel="milliseconds per image (log scale)", ylabel="mean error (%)", title="error against cost")
    right = plot_tradeoff(eces, new_panel(WIDE), colours=colours)
    right.set(xlabel="mean error (%)", ylabel="ECE (%)", title="calibration against error")
    devices = sorted({run.facts.device for run in results.all_runs()})
    note = f"Times were measured on {', '.join(devices)}" + (
        "; lines from different devices cannot be compared." if len(devices) > 1 else "."
    )
    note += " Points without a name have no room for it; the table above has them all."
    caption = (
        "Good methods are low and to the left in both pictures: few errors for little time, and confidences that can "
        "be believed. The grey steps join the lines that no other beats in both."
    )
    panels = [
        Panel(encode(left), "Error against milliseconds per image: " + _list_points(costs)),
        Panel(encode(right), "ECE against error: " + _list_points(eces)),
    ]
    return Exhibit("What it costs, and what confidences are worth", caption, [Strip(panels, 2)], details=note)


def _one_for_each_label(results: Results, lines: Sequence[Line]) -> list[Line]:
    """The given lines, and for each other label its first line that does not see labels batch by batch."""
    found = {line.label: line for line in results.lines[::-1] if line.rule != "oracle"}
    return list((found | {line.label: line for line in lines}).values())


def _list_points(points: Sequence[Point]) -> str:
    return ", ".join(f"{point.name} {point.x:.3g} / {point.y:.3g}" for point in points)


def show_reliability(results: Results, lines: Sequence[Line]) -> Exhibit:
    """A reliability diagram for each line."""
    panels = []
    for line in lines:
        reliability = results.reliability(line)
        if reliability is not None:
            ax = plot_reliability(reliability, new_panel((3.0, 3.3)))
            ece = 100 * (line.mean("ece", results.columns) or 0.0)
            ax.set_title(f"{line.label}: ECE {ece:.1f}")
            panels.append(Panel(encode(ax), f"Reliability diagram of {line.label}, mean ECE {ece:.1f} %"))
    caption = (
        "Predictions sorted by their confidence: blue is how often they are right. For a calibrated method the blue "
        "bars end at the dashed line; red hatching is the gap, grey below shows where the predictions are."
    )
    details = "All runs of a line together; the ECE in a title is the mean over streams, as in the tables."
    return Exhibit("Can the confidences be believed?", caption, [Strip(panels, 4)], details=details)


def pick_duels(
    results: Results, comparisons: Sequence[PairedComparison], lines: Sequence[Line]
) -> list[PairedComparison]:
    """One for each label, the best first; those without a common stream are left out."""
    picked = {id(line) for line in _one_for_each_label(results, lines)}
    shown = [
        comparison
        for comparison in comparisons
        if id(comparison.line) in picked and comparison.total is not None
    ]
    return sorted(shown, key=lambda comparison: comparison.total.difference if comparison.total else 0.0)


def show_duels(
    results: Results, comparisons: Sequence[PairedComparison], lines: Sequence[Line]
) -> Exhibit | None:
    """Differences to the reference with their intervals, and wins, ties and losses."""
    shown = pick_duels(results, comparisons, lines)
    if not shown:
        return None
    left_out = len(shown[TALL:])
    shown = shown[:TALL]
    size = (WIDE[0], 1.3 + 0.27 * len(shown))
    reference = shown[0].reference.label
    intervals = {
        comparison.line.label: comparison.total for comparison in shown if comparison.total is not None
    }
    left = plot_differences(intervals, new_panel(size), reference=reference)
    counts = {
        comparison.line.label: tuple(comparison.verdicts.count(word) for word in ("better", "tie", "worse"))
        for comparison in shown
    }
    right = plot_scores(counts, new_panel(size))  # type: ignore[arg-type]
    texts = ", ".join(f"{name} {100 * gap.difference:+.1f}" for name, gap in intervals.items())
    panels = [
        Panel(encode(left), f"Difference in error to {reference}, in points: {texts}"),
        Panel(
            encode(right),
            f"In how many columns each line is better than, as good as or worse than {reference}",
        ),
    ]
    caption = (
        f"Left: how many points of error each line has more or less than {reference} on the same batches, with "
        "95\u00a0% intervals. Right: the same asked of each column by itself; a tie is an interval that contains zero."
    )
    key = [
        (colour, f"{word} than {reference}" if word != "tie" else "tie") for word, colour in SCORES.items()
    ]
    details = _doubt(shown)
    details += (
        f" The {count(left_out, 'line')} with the most errors are in the table only." if left_out else ""
    )
    return Exhibit("Is the difference real?", caption, [Strip(panels, 2)], key, details)


def _doubt(comparisons: Sequence[PairedComparison]) -> str:
    """What the intervals do not say."""
    text = (
        "Intervals: bootstrap over batches. They speak of these streams and these source models, not of others, and "
        "nothing is corrected for the number of comparisons."
    )
    batches = min(
        len(run.record.sizes())
        for comparison in comparisons
        for runs in comparison.line.runs.values()
        for run in runs
    )
    if batches < FEW:
        text += f" With only {batches} batches in a stream they are too narrow."
    return text
