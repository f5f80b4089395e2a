"""Figures of a study for a document of text: curves along the stream, errors by condition, differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ttvd.report.charts import plot_differences
from ttvd.report.curves import plot_curves, spread
from ttvd.report.pictures import TALL, WIDE, choose_range, count_batches, give_colours, mean_curve, pick_duels
from ttvd.report.results import show_condition, show_value
from ttvd.report.style import FAINT, house_style, line_colours, new_panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ttvd.bench.study import Cell, Column, Line
    from ttvd.report.comparisons import PairedComparison
    from ttvd.report.results import Results

FEW = 6
"""Columns up to which each has a picture of its own."""


def draw_curves(results: Results, lines: Sequence[Line]) -> Figure | None:
    """Error along the stream: a picture for each of few columns, else one for their mean; None without batches."""
    groups: dict[str, list[Column]] = {"mean over all columns": results.columns}
    if len(results.columns) <= FEW:
        groups = {column.label: [column] for column in results.columns}
    colours, drawn = give_colours(results, lines), []
    for title, columns in groups.items():
        found = {line.label: mean_curve(results, line, columns, "error") for line in lines}
        curves = {name: curve for name, curve in found.items() if curve is not None}
        if curves:
            drawn.append((title, curves, count_batches(results, lines, columns)))
    if not drawn:
        return None
    with house_style():
        figure, panels = _new_figure(len(drawn))
        for (title, curves, batches), ax in zip(drawn, panels, strict=True):
            bottom, top = choose_range(list(curves.values()))
            look: Any = {
                "top": top,
                "bottom": bottom,
                "strong": results.study.reference(),
                "colours": colours,
                "batches": batches,
            }
            plot_curves(curves, ax, **look).set_title(title)
    return figure


def draw_conditions(results: Results, lines: Sequence[Line]) -> Figure | None:
    """Mean error under each condition; None where there is but one."""
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
    ticks, label = _name_conditions(conditions)
    with house_style():
        figure, (ax,) = _new_figure(1)
        look: Any = {"strong": results.study.reference(), "colours": give_colours(results, lines)}
        plot_conditions(errors, ticks, ax, **look).set_xlabel(label)
    return figure


def draw_duels(
    comparisons: Sequence[PairedComparison], lines: Sequence[Line], results: Results
) -> Figure | None:
    """Difference in error of each line to the reference, with intervals."""
    shown = pick_duels(results, comparisons, lines)[:TALL]
    intervals = {
        comparison.line.label: comparison.total for comparison in shown if comparison.total is not None
    }
    if not intervals:
        return None
    with house_style():
        ax = new_panel((WIDE[0] + 1.5, 1.3 + 0.27 * len(intervals)))
        plot_differences(intervals, ax, reference=shown[0].reference.label)
    figure: Figure = ax.get_figure(root=True)  # type: ignore[assignment]
    return figure


def plot_conditions(
    errors: Mapping[str, Sequence[float]],
    ticks: Sequence[str],
    ax: Axes,
    *,
    strong: str | None = None,
    colours: Mapping[str, str] | None = None,
) -> Axes:
    """Draw the error under each of several conditions, each line named at its end.

    Args:
        errors: In [0, 1], one for each condition, by name.
        ticks: Names of the conditions, in order.
        ax: Axes to draw on.
        strong: Name of the line that is drawn thicker.
        colours: Of the lines, by name; the palette's in order unless given.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = plot_conditions({"bn": [0.2, 0.4]}, ["64", "8"], Figure().subplots())
        >>> ax.lines[0].get_ydata().tolist(), ax.texts[0].get_text()
        ([20.0, 40.0], 'bn 40.0')
    """
    colours = line_colours(list(errors)) if colours is None else colours
    values = {name: 100 * np.array(row) for name, row in errors.items()}
    low, high = (f([f(row) for row in values.values()]) for f in (min, max))
    places = spread([float(row[-1]) for row in values.values()], gap=0.06 * max(high - low, 1.0))
    for (name, row), place in zip(values.items(), places, strict=True):
        bold: Any = {"linewidth": 2.8 if name == strong else 1.6, "marker": "o", "markersize": 4}
        ax.plot(np.arange(len(row)), row, color=colours[name], **bold)
        weight = "bold" if name == strong else "normal"
        text: Any = {"color": colours[name], "fontsize": 9, "fontweight": weight, "va": "center"}
        ax.text(len(row) - 0.93, place, f"{name} {row[-1]:.1f}", **text)
    ax.set_xticks(range(len(ticks)), list(ticks))
    ax.set_ylabel("mean error (%)")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color=FAINT, linewidth=0.7)
    return ax


def _name_conditions(conditions: Sequence[Cell]) -> tuple[list[str], str]:
    """Names of the ticks, and of the axis where all conditions vary the same things: values below each other."""
    names = {tuple(name for name, _ in condition) for condition in conditions}
    if names == {("sites",)}:
        return [
            f"{100 * value:g}" for ((_, value),) in conditions
        ], "share of the source data for class means (%)"
    if len(names) == 1:
        below = ["\n".join(show_value(value) for _, value in condition) for condition in conditions]
        return below, ", ".join(names.pop()).replace("_", " ")
    return [show_condition(condition) for condition in conditions], ""


def _new_figure(panels: int) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, two in a row."""
    from matplotlib.figure import Figure

    columns = min(panels, 2)
    rows = -(-panels // columns)
    figure = Figure(figsize=(WIDE[0] * columns, 0.85 * WIDE[1] * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for spare in axes[panels:]:
        spare.set_axis_off()
    return figure, axes[:panels]
