"""Figures of a study: curves along the stream, error against cost, reliability, conditions, paired differences.

Of many lines only some are drawn, and the figure says which. The functions ``show_*`` return figures for a page;
``show_*_file`` functions return figures of a single picture, for documents that keep pictures in files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ttvd.bench.packed import PackedRecord, has_batches
from ttvd.report.charts import (
    VERDICT_COLOURS,
    Floats,
    Point,
    plot_conditions,
    plot_curves,
    plot_differences,
    plot_kept,
    plot_reliability,
    plot_tradeoff,
    plot_verdicts,
)
from ttvd.report.document import Figure, Panel, PanelRow
from ttvd.report.results import chosen_without_labels, count, format_condition, format_value
from ttvd.report.style import figure_style, line_colours, new_panel, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ttvd.bench.study import Cell, Column, Line
    from ttvd.report.results import Results
    from ttvd.report.tables import PairedComparison

MOST_LINES = 8
CONTROLS = ("source", "bn")
"""Methods without gradient steps: the others must show what their steps gain over these."""

WIDE, SMALL = (5.6, 4.2), (3.4, 2.6)
MOST_POINTS = 200
MOST_COMPARISONS = 20
MOST_PANELS = 6
"""Number of columns up to which each has a panel of its own in a file."""

FEW_BATCHES = 30
"""Batches of a stream below which a bootstrap over them gives intervals that are too narrow."""


def pick_lines(results: Results, reference: str | None = None) -> list[Line]:
    """Pick at most eight lines for figures: one rule for each label; the reference, the controls, the best others."""
    choices: dict[str, Line] = {}
    for line in results.lines:
        if line.rule != "oracle" and results.error(line) is not None:
            known = choices.get(line.label)
            if known is None or (chosen_without_labels(line) and not chosen_without_labels(known)):
                choices[line.label] = line
    ranked = sorted(choices.values(), key=lambda line: results.error(line) or 0.0)
    label = reference or results.study.reference()
    first = [line for line in ranked if line.label == label or line.method in CONTROLS]
    best = [line for line in ranked if line not in first]
    chosen = {id(line) for line in [*first, *best][:MOST_LINES]}
    return [line for line in choices.values() if id(line) in chosen]


def pick_colours(results: Results, lines: Sequence[Line]) -> dict[str, str]:
    """Return the colours of lines, the same in all figures; the reference has the first colour."""
    reference = results.study.reference()
    labels = sorted((line.label for line in lines), key=lambda label: label != reference)
    return line_colours(labels)


def explain_choice(results: Results, lines: Sequence[Line]) -> str:
    """Say which lines are drawn, if not all are."""
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


def show_stream(results: Results, lines: Sequence[Line]) -> Figure | None:
    """Show error so far and share kept along the stream, over all columns; None without batches."""
    curves = _mean_curves(results, lines, results.columns)
    if not curves:
        return None
    colours, batches = pick_colours(results, lines), _count_batches(results, lines, results.columns)
    panels = [_draw_curves(curves, colours, "all columns", WIDE, batches, results.study.reference())]
    learning = [line for line in lines if results.kept(line) is not None]
    kept = _mean_curves(results, learning, results.columns, "kept")
    filtered = {name: curve for name, curve in kept.items() if float(curve.min()) < 0.999}
    if filtered:
        ax = plot_kept(filtered, new_panel(WIDE), colours=colours, batches=batches)
        ax.set_title("samples kept")
        text = "Share of each batch that took part in the steps, for " + ", ".join(filtered)
        panels.append(Panel(to_svg(ax), text))
    caption = (
        "Left: the error over all samples seen so far, mean over columns and seeds; a method that learns goes down. "
        "The number at the end of a line is its final error; an arrow says that the line is above the picture."
        + (" Right: the share of each batch that a method uses for its gradient steps." if filtered else "")
    )
    return Figure("Along the stream", caption, [PanelRow(panels, 2)], details=explain_choice(results, lines))


def show_each_stream(results: Results, lines: Sequence[Line]) -> Figure | None:
    """Show the curves of each column, or of each condition if there are several; None without batches."""
    conditions = results.conditions()
    groups = conditions if len(conditions) > 1 else {column.label: [column] for column in results.columns}
    panels, colours = [], pick_colours(results, lines)
    for title, columns in groups.items():
        if curves := _mean_curves(results, lines, columns):
            batches = _count_batches(results, lines, columns)
            panels.append(_draw_curves(curves, colours, title, SMALL, batches))
    if not panels:
        return None
    key = [(colour, name) for name, colour in colours.items()]
    caption = "Error over all samples seen so far against batches seen, mean over seeds."
    return Figure("Adaptation curves", caption, [PanelRow(panels, 3)], key)


def show_stream_file(results: Results, lines: Sequence[Line], name: str) -> Figure | None:
    """Show error along the stream in one picture: a panel for each of few columns, else one for their mean."""
    groups: dict[str, list[Column]] = {"mean over all columns": results.columns}
    if len(results.columns) <= MOST_PANELS:
        groups = {column.label: [column] for column in results.columns}
    found = {title: _mean_curves(results, lines, columns) for title, columns in groups.items()}
    drawn = {title: curves for title, curves in found.items() if curves}
    if not drawn:
        return None
    with figure_style():
        axes = _new_axes(len(drawn))
        for (title, curves), ax in zip(drawn.items(), axes, strict=True):
            bottom, top = choose_range(list(curves.values()))
            look: Any = {"strong": results.study.reference(), "colours": pick_colours(results, lines)}
            batches = _count_batches(results, lines, groups[title])
            plot_curves(curves, ax, top=top, bottom=bottom, batches=batches, **look).set_title(title)
    caption = "Error over all samples seen so far, mean over seeds; the number at the end of a line is its final error."
    return _to_figure(axes[0], f"{caption} {explain_choice(results, lines)}", name)


def _to_figure(ax: Axes, caption: str, name: str) -> Figure:
    return Figure("", caption.strip(), [PanelRow([Panel(to_svg(ax), name)], 1)], name=name)


def _new_axes(panels: int) -> list[Axes]:
    """Return the axes of a new picture with some panels, two in a row."""
    from matplotlib.figure import Figure as Canvas

    columns = min(panels, 2)
    rows = -(-panels // columns)
    figure = Canvas(figsize=(WIDE[0] * columns, 0.85 * WIDE[1] * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for spare in axes[panels:]:
        spare.set_axis_off()
    return axes[:panels]


def _draw_curves(
    curves: Mapping[str, Floats],
    colours: Mapping[str, str],
    title: str,
    size: tuple[float, float],
    batches: int,
    strong: str | None = None,
) -> Panel:
    bottom, top = choose_range(list(curves.values()))
    look: Any = {"strong": strong, "named": strong is not None, "colours": colours, "batches": batches}
    ax = plot_curves(curves, new_panel(size), top=top, bottom=bottom, **look)
    ax.set_title(title)
    ends = ", ".join(f"{name} {curve[-1]:.1%}" for name, curve in curves.items())
    return Panel(to_svg(ax), f"Error so far, {title}; at the end: {ends}")


def choose_range(curves: Sequence[Floats]) -> tuple[float, float]:
    """Choose the errors to show: without the noisy first batches and without lines far above the others."""
    highs = sorted(float(curve[len(curve) // 8 :].max()) for curve in curves)
    low = min(float(curve[len(curve) // 8 :].min()) for curve in curves)
    usual = highs[len(highs) // 2]
    high = max(value for value in highs if value - low <= 2 * (usual - low) or value == usual)
    room = 0.12 * (high - low) + 0.005
    return max(0.0, low - room), min(1.0, high + room)


def _mean_curves(
    results: Results, lines: Sequence[Line], columns: Sequence[Column], what: str = "error"
) -> dict[str, Floats]:
    """Return the mean curve of each line by label; a line is left out unless all its streams have the same length."""
    found: dict[str, Floats] = {}
    for line in lines:
        runs = results.runs(line, columns)
        if not runs or len({len(run.record.sizes()) for run in runs}) != 1 or not all(map(has_batches, runs)):
            continue
        if what == "error":
            curves = [run.record.curve() for run in runs]
        elif any(isinstance(run.record, PackedRecord) for run in runs):
            continue  # packed runs keep no share for each batch
        else:
            curves = [torch.tensor([row.kept for row in run.record.rows]).double() for run in runs]
        found[line.label] = _thin(torch.stack(curves).mean(0)).numpy()
    return found


def _count_batches(results: Results, lines: Sequence[Line], columns: Sequence[Column]) -> int:
    """Return the number of batches of the longest stream; a curve may have fewer points."""
    return max(len(run.record.sizes()) for line in lines for run in results.runs(line, columns))


def _thin(curve: Tensor) -> Tensor:
    """Average neighbours if a curve has more points than a picture can show."""
    step = -(-len(curve) // MOST_POINTS)
    return curve if step == 1 else torch.stack([part.mean() for part in curve.split(step)])


def show_conditions_file(results: Results, lines: Sequence[Line], name: str) -> Figure | None:
    """Show the mean error under each condition; None if there is only one."""
    conditions = results.study.conditions()
    if len(conditions) < 2:
        return None
    groups = [[column for column in results.columns if column.condition == each] for each in conditions]
    errors: dict[str, list[float]] = {}
    for line in lines:
        means = [line.mean("error", columns) for columns in groups]
        if None not in means:
            errors[line.label] = [mean for mean in means if mean is not None]
    if not errors:
        return None
    ticks, label = name_conditions(conditions)
    with figure_style():
        (ax,) = _new_axes(1)
        look: Any = {"strong": results.study.reference(), "colours": pick_colours(results, lines)}
        plot_conditions(errors, ticks, ax, **look).set_xlabel(label)
    caption = "Mean error over the domains of each condition. " + explain_choice(results, lines)
    return _to_figure(ax, caption, name)


def name_conditions(conditions: Sequence[Cell]) -> tuple[list[str], str]:
    """Return names for the ticks, and for the axis if all conditions vary the same things."""
    names = {tuple(name for name, _ in condition) for condition in conditions}
    if names == {("sites",)}:
        ticks = [f"{100 * value:g}" for ((_, value),) in conditions]
        return ticks, "share of the source data for class means (%)"
    if len(names) == 1:
        below = ["\n".join(format_value(value) for _, value in condition) for condition in conditions]
        return below, ", ".join(names.pop()).replace("_", " ")
    return [format_condition(condition) for condition in conditions], ""


def show_tradeoffs(results: Results, lines: Sequence[Line]) -> Figure | None:
    """Show error against cost and error against calibration, one point for each label; oracles are left out."""
    shown = [line for line in _one_per_label(results, lines) if results.error(line) is not None]
    if not shown:
        return None
    colours = pick_colours(results, lines)
    errors = {line.label: 100 * (results.error(line) or 0.0) for line in shown}
    costs = [Point(line.label, results.milliseconds(line) or 0.0, errors[line.label]) for line in shown]
    eces = {line.label: 100 * (line.mean("ece", results.columns) or 0.0) for line in shown}
    calibration = [Point(label, errors[label], eces[label]) for label in errors]
    left = plot_tradeoff(costs, new_panel(WIDE), colours=colours, log=True)
    left.set(xlabel="milliseconds per image (log scale)", ylabel="mean error (%)", title="error against cost")
    right = plot_tradeoff(calibration, new_panel(WIDE), colours=colours)
    right.set(xlabel="mean error (%)", ylabel="ECE (%)", title="calibration against error")
    devices = sorted({run.facts.device for run in results.all_runs()})
    note = f"Times were measured on {', '.join(devices)}" + (
        "; times on different devices cannot be compared." if len(devices) > 1 else "."
    )
    note += " Points without a name have no room for it; the table above has them all."
    caption = (
        "Good methods are low and to the left in both pictures: few errors in little time, and few errors with "
        "confidences that match the accuracy. The grey steps join the lines that no other line beats in both."
    )
    panels = [
        Panel(to_svg(left), "Error against milliseconds per image: " + _list_points(costs)),
        Panel(to_svg(right), "ECE against error: " + _list_points(calibration)),
    ]
    return Figure("Error, cost and calibration", caption, [PanelRow(panels, 2)], details=note)


def _one_per_label(results: Results, lines: Sequence[Line]) -> list[Line]:
    """Return the given lines, and for each other label its first line that is not an oracle."""
    found = {line.label: line for line in results.lines[::-1] if line.rule != "oracle"}
    return list((found | {line.label: line for line in lines}).values())


def _list_points(points: Sequence[Point]) -> str:
    return ", ".join(f"{point.name} {point.x:.3g} / {point.y:.3g}" for point in points)


def show_reliability(results: Results, lines: Sequence[Line]) -> Figure:
    """Show a reliability diagram for each line."""
    panels = []
    for line in lines:
        reliability = results.reliability(line)
        if reliability is not None:
            ax = plot_reliability(reliability, new_panel((3.0, 3.3)))
            ece = 100 * (line.mean("ece", results.columns) or 0.0)
            ax.set_title(f"{line.label}: ECE {ece:.1f}")
            panels.append(Panel(to_svg(ax), f"Reliability diagram of {line.label}, mean ECE {ece:.1f} %"))
    caption = (
        "Predictions grouped by their confidence: blue is how often they are right. For a calibrated method the blue "
        "bars end at the dashed line; red hatching is the gap, and grey below shows where the predictions are."
    )
    details = "All runs of a line together; the ECE in a title is the mean over streams, as in the tables."
    return Figure("Reliability diagrams", caption, [PanelRow(panels, 4)], details=details)


def pick_comparisons(
    results: Results, comparisons: Sequence[PairedComparison], lines: Sequence[Line]
) -> list[PairedComparison]:
    """Pick one comparison for each label, the best first; those without a common stream are left out."""
    picked = {id(line) for line in _one_per_label(results, lines)}
    shown = [item for item in comparisons if id(item.line) in picked and item.total is not None]
    return sorted(shown, key=lambda item: item.total.difference if item.total else 0.0)


def show_comparisons(
    results: Results, comparisons: Sequence[PairedComparison], lines: Sequence[Line]
) -> Figure | None:
    """Show differences to the reference with their intervals, and wins, ties and losses; None without any."""
    shown = pick_comparisons(results, comparisons, lines)
    if not shown:
        return None
    left_out = len(shown[MOST_COMPARISONS:])
    shown = shown[:MOST_COMPARISONS]
    size = (WIDE[0], 1.3 + 0.27 * len(shown))
    reference = shown[0].reference.label
    intervals = {item.line.label: item.total for item in shown if item.total is not None}
    left = plot_differences(intervals, new_panel(size), reference=reference)
    counts = {
        item.line.label: tuple(item.verdicts.count(verdict) for verdict in VERDICT_COLOURS) for item in shown
    }
    right = plot_verdicts(counts, new_panel(size))  # type: ignore[arg-type]
    texts = ", ".join(f"{name} {100 * gap.difference:+.1f}" for name, gap in intervals.items())
    panels = [
        Panel(to_svg(left), f"Difference in error to {reference}, in points: {texts}"),
        Panel(
            to_svg(right), f"In how many columns each line is better than, equal to or worse than {reference}"
        ),
    ]
    caption = (
        f"Left: how many points of error each line has more or less than {reference} on the same batches, with "
        "95\u00a0% intervals. Right: the same for each column by itself; a tie is an interval that contains zero."
    )
    key = [
        (colour, f"{verdict} than {reference}" if verdict != "tie" else "tie")
        for verdict, colour in VERDICT_COLOURS.items()
    ]
    details = _limits_of_intervals(shown)
    if left_out:
        details += f" The {count(left_out, 'line')} with the most errors are in the table only."
    return Figure("Paired differences", caption, [PanelRow(panels, 2)], key, details)


def _limits_of_intervals(comparisons: Sequence[PairedComparison]) -> str:
    text = (
        "Intervals: bootstrap over batches. They speak of these streams and these source models, not of others, and "
        "nothing is corrected for the number of comparisons."
    )
    batches = min(
        len(run.record.sizes()) for item in comparisons for runs in item.line.runs.values() for run in runs
    )
    if batches < FEW_BATCHES:
        text += f" With only {batches} batches in a stream they are too narrow."
    return text


def show_comparisons_file(
    results: Results, comparisons: Sequence[PairedComparison], lines: Sequence[Line], name: str
) -> Figure | None:
    """Show the difference in error of each line to the reference with intervals, in one picture; None without any."""
    shown = pick_comparisons(results, comparisons, lines)[:MOST_COMPARISONS]
    intervals = {item.line.label: item.total for item in shown if item.total is not None}
    if not intervals:
        return None
    with figure_style():
        ax = new_panel((WIDE[0] + 1.5, 1.3 + 0.27 * len(intervals)))
        plot_differences(intervals, ax, reference=shown[0].reference.label)
    caption = "Difference in error on the same batches, with 95 % intervals; left of zero: fewer errors."
    return _to_figure(ax, caption, name)
