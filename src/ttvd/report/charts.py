"""Charts: error along a stream, reliability, error against cost, paired differences, classes along a stream.

Each function takes data and axes, draws, and returns the axes. It changes neither its data nor global settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ttvd.metrics import Reliability
from ttvd.report.style import FAINT, INK, MUTED, PALETTE, RIGHT, WRONG, lighten, line_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ttvd.bench.compare import Interval

Floats = npt.NDArray[np.float64]

LETTER_WIDTH = 0.62
"""Mean width of a letter of the figures' font, as a share of the font size."""

VERDICT_COLOURS = {"better": lighten(RIGHT, 0.25), "tie": FAINT, "worse": lighten(WRONG, 0.45)}
"""Colours of bars that count wins, ties and losses."""


def plot_curves(
    curves: Mapping[str, Floats],
    ax: Axes,
    *,
    top: float = 1.0,
    bottom: float = 0.0,
    strong: str | None = None,
    named: bool = True,
    colours: Mapping[str, str] | None = None,
    batches: int | None = None,
) -> Axes:
    """Draw the error over all samples seen so far against the number of batches; each line is named at its end.

    Args:
        curves: Error in [0, 1] after each batch, by name, as ``Record.curve`` returns it.
        ax: Axes to draw on.
        top: Highest error to show. A line that ends above it is named at the upper edge, with its last value.
        bottom: Lowest error to show.
        strong: Name of the line that is drawn thicker.
        named: Whether to write names; without them, the colours must be explained elsewhere.
        colours: Colours of the lines by name; those of the palette by default.
        batches: Number of batches, if the curves have fewer points.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = plot_curves({"bn": np.array([0.5, 0.25])}, Figure().subplots())
        >>> ax.lines[0].get_ydata().tolist(), ax.texts[0].get_text()
        ([50.0, 25.0], 'bn 25.0')
    """
    from matplotlib.ticker import MaxNLocator

    colours = line_colours(list(curves)) if colours is None else colours
    last = batches or max(len(curve) for curve in curves.values())
    ends = {name: 100 * float(curve[-1]) for name, curve in curves.items()}
    ranked = sorted(ends, key=lambda name: ends[name])  # names above the picture keep their order
    heights = [min(ends[name], 100 * top) for name in ranked]
    places = dict(zip(ranked, spread_apart(heights, gap=5.4 * (top - bottom)), strict=True))
    for name, curve in curves.items():
        bold = name == strong
        points, width = place_points(curve, batches), 2.8 if bold else 1.6
        marker = "o" if len(curve) == 1 else ""  # a line of one point is not visible
        ax.plot(points, 100 * curve, color=colours[name], linewidth=width, marker=marker)
        if named:
            text = f"{name} {ends[name]:.1f}" + (" ↑" if ends[name] > 100 * top else "")
            _name_line(ax, last * 1.02, places[name], text, colours[name], bold=bold)
    ax.set(xlim=(1, max(last, 2)), ylim=(100 * bottom, 100 * top))
    ax.set(xlabel="batches seen", ylabel="error so far (%)")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color=FAINT, linewidth=0.7)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ax


def _name_line(ax: Axes, x: float, y: float, text: str, colour: str, *, bold: bool = False) -> None:
    weight = "bold" if bold else "normal"
    ax.text(x, y, text, color=colour, fontsize=9, fontweight=weight, va="center")


def place_points(curve: Floats, batches: int | None = None) -> Floats:
    """Return after how many batches each point of a curve is drawn; the last point is at ``batches``, if given.

    Example:
        >>> place_points(np.array([0.5, 0.4, 0.3]), 6).tolist()
        [2.0, 4.0, 6.0]
    """
    return np.arange(1, len(curve) + 1, dtype=np.float64) * (1.0 if batches is None else batches / len(curve))


def spread_apart(values: list[float], gap: float) -> list[float]:
    """Move values as little as needed so that neighbours are at least ``gap`` apart.

    Their order is kept, and each group of crowded values keeps its mean.

    Example:
        >>> spread_apart([1.0, 1.0, 9.0], gap=2.0)
        [0.0, 2.0, 9.0]
    """
    order = sorted(range(len(values)), key=lambda index: values[index])
    groups: list[list[float]] = []  # each: mean of its members, number of members
    for index in order:
        groups.append([values[index], 1.0])
        while len(groups) > 1 and groups[-1][0] - groups[-2][0] < gap * (groups[-1][1] + groups[-2][1]) / 2:
            centre, count = groups.pop()
            before, members = groups[-1]
            groups[-1] = [(centre * count + before * members) / (count + members), count + members]
    placed = [centre + gap * (i - (count - 1) / 2) for centre, count in groups for i in range(int(count))]
    moved = dict(zip(order, placed, strict=True))
    return [moved[index] for index in range(len(values))]


def plot_kept(
    shares: Mapping[str, Floats],
    ax: Axes,
    *,
    colours: Mapping[str, str] | None = None,
    batches: int | None = None,
) -> Axes:
    """Draw the share of each batch that took part in the gradient steps; each line is named at its end.

    Args:
        shares: Share in [0, 1] after each batch, by name.
        ax: Axes to draw on.
        colours: Colours of the lines by name; those of the palette by default.
        batches: Number of batches, if the lines have fewer points.
    """
    from matplotlib.ticker import MaxNLocator

    colours = line_colours(list(shares)) if colours is None else colours
    last = batches or max(len(values) for values in shares.values())
    places = spread_apart([100 * float(values[-1]) for values in shares.values()], gap=6.0)
    for (name, values), place in zip(shares.items(), places, strict=True):
        ax.plot(place_points(values, batches), 100 * values, color=colours[name], linewidth=1.6)
        _name_line(ax, last * 1.02, place, f"{name} {100 * values[-1]:.0f}", colours[name])
    ax.set(xlim=(1, last), ylim=(0, 103), xlabel="batches seen", ylabel="kept (%)")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color=FAINT, linewidth=0.7)
    return ax


def plot_conditions(
    errors: Mapping[str, Sequence[float]],
    ticks: Sequence[str],
    ax: Axes,
    *,
    strong: str | None = None,
    colours: Mapping[str, str] | None = None,
) -> Axes:
    """Draw the error under each of several conditions; each line is named at its end.

    Args:
        errors: Error in [0, 1] for each condition, by name.
        ticks: Names of the conditions, in order.
        ax: Axes to draw on.
        strong: Name of the line that is drawn thicker.
        colours: Colours of the lines by name; those of the palette by default.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = plot_conditions({"bn": [0.2, 0.4]}, ["64", "8"], Figure().subplots())
        >>> ax.lines[0].get_ydata().tolist(), ax.texts[0].get_text()
        ([20.0, 40.0], 'bn 40.0')
    """
    colours = line_colours(list(errors)) if colours is None else colours
    values = {name: 100 * np.array(row) for name, row in errors.items()}
    low, high = (f([f(row) for row in values.values()]) for f in (min, max))
    places = spread_apart([float(row[-1]) for row in values.values()], gap=0.06 * max(high - low, 1.0))
    for (name, row), place in zip(values.items(), places, strict=True):
        look: Any = {"linewidth": 2.8 if name == strong else 1.6, "marker": "o", "markersize": 4}
        ax.plot(np.arange(len(row)), row, color=colours[name], **look)
        _name_line(ax, len(row) - 0.93, place, f"{name} {row[-1]:.1f}", colours[name], bold=name == strong)
    ax.set_xticks(range(len(ticks)), list(ticks))
    ax.set_ylabel("mean error (%)")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color=FAINT, linewidth=0.7)
    return ax


def plot_reliability(reliability: Reliability, ax: Axes) -> Axes:
    """Draw the accuracy of each confidence bin, its gap to the confidence, and the share of samples in the bins.

    Args:
        reliability: Bins as ``RunningMetrics.reliability`` returns them; empty bins are not drawn.
        ax: Axes to draw on.
    """
    count = reliability.count.numpy()
    used = count > 0
    width = 1 / len(count)
    left = np.arange(len(count))[used] * width
    accuracy, confidence = reliability.accuracy.numpy()[used], reliability.confidence.numpy()[used]
    bars: dict[str, Any] = {"width": width, "align": "edge", "linewidth": 0.6}
    ax.bar(left, accuracy, color=PALETTE[0], edgecolor="white", label="accuracy", **bars)
    low, gap = np.minimum(accuracy, confidence), np.abs(confidence - accuracy)
    hatched: dict[str, Any] = {"facecolor": "#ffffff90", "edgecolor": WRONG, "hatch": "////"}
    ax.bar(left, gap, bottom=low, label="gap to confidence", **hatched, **bars)
    ax.plot([0, 1], [0, 1], color=INK, linewidth=1.0, linestyle="--")
    share = 0.18 * count[used] / count.max()
    ax.bar(left, share, bottom=-0.2, color=MUTED, label="share of samples", **bars)
    ax.axhline(0, color=INK, linewidth=0.8)
    ax.set(xlim=(0, 1), ylim=(-0.2, 1), yticks=[0, 0.5, 1], xticks=[0, 0.5, 1], aspect="equal")
    ax.set(xlabel="confidence", ylabel="accuracy")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


@dataclass(frozen=True)
class Point:
    """A method in a chart of two numbers that should both be low."""

    name: str
    x: float
    y: float


def plot_tradeoff(
    points: Sequence[Point], ax: Axes, *, colours: Mapping[str, str] | None = None, log: bool = False
) -> Axes:
    """Draw two numbers of each method against each other; steps join the methods on the Pareto front.

    Args:
        points: The methods.
        ax: Axes to draw on.
        colours: Colours of highlighted methods by name; the others are grey. A name is written if there is room.
        log: Whether x has a logarithmic scale.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = plot_tradeoff([Point("bn", 0.1, 40), Point("tent", 0.3, 30)], Figure().subplots(), log=True)
        >>> ax.get_xscale(), [text.get_text() for text in ax.texts]
        ('log', ['bn', 'tent'])
    """
    colours = colours or {}
    front = pareto_front(points)
    steps: Any = {"color": FAINT, "linewidth": 3, "zorder": 1, "drawstyle": "steps-post"}
    ax.plot([point.x for point in front], [point.y for point in front], **steps)
    for point in points:
        colour = colours.get(point.name, MUTED)
        ax.scatter([point.x], [point.y], s=48, color=colour, edgecolors="white", zorder=3)
    if log:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        # Only 2 and 5 of each decade get a name, which leaves room between names.
        ax.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "25" else "")
    ax.margins(x=0.16, y=0.1)
    ax.autoscale_view()
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color=FAINT, linewidth=0.7)
    ranks = {name: rank for rank, name in enumerate(colours)}  # highlighted methods are named first
    _name_points(sorted(points, key=lambda p: ranks.get(p.name, len(ranks))), ax, colours)
    return ax


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other point beats in both numbers, from left to right.

    Example:
        >>> [p.name for p in pareto_front([Point("a", 1, 5), Point("b", 2, 6), Point("c", 3, 2)])]
        ['a', 'c']
    """
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.x, p.y)):
        if not front or point.y < front[-1].y:
            front.append(point)
    return front


def _name_points(points: Sequence[Point], ax: Axes, colours: Mapping[str, str]) -> None:
    """Write names beside points where they hide nothing; leave out a name without room."""
    size = 9.0
    taken = [_box(ax, point, 8.0, 8.0, (0.0, 0.0)) for point in points]
    left = ax.bbox.x0 * 72 / ax.get_figure(root=True).dpi  # type: ignore[union-attr]
    for point in points:
        wide, high = LETTER_WIDTH * size * len(point.name), 1.25 * size
        for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)):
            shift = (dx * (wide / 2 + 6), dy * (high / 2 + 5))
            box = _box(ax, point, wide, high, shift)
            if box[0] > left and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                text: Any = {"ha": "center", "va": "center", "fontsize": size, "textcoords": "offset points"}
                colour = colours.get(point.name, INK)
                ax.annotate(point.name, (point.x, point.y), xytext=shift, color=colour, **text)
                break


def _box(ax: Axes, point: Point, wide: float, high: float, shift: tuple[float, float]) -> Floats:
    """Return the left, lower, right and upper edge in points of the page."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    x, y = ax.transData.transform((point.x, point.y)) * 72 / figure.dpi + shift
    return np.array([x - wide / 2, y - high / 2, x + wide / 2, y + high / 2])


def _overlap(one: Floats, other: Floats) -> bool:
    return bool((one[:2] < other[2:]).all() and (other[:2] < one[2:]).all())


def plot_verdicts(counts: Mapping[str, tuple[int, int, int]], ax: Axes) -> Axes:
    """Draw in how many columns each line is better than, equal to and worse than the reference.

    Args:
        counts: Wins, ties and losses by name, from top to bottom.
        ax: Axes to draw on.
    """
    from matplotlib.ticker import MaxNLocator

    left = np.zeros(len(counts))
    for number, colour in enumerate(VERDICT_COLOURS.values()):
        values = np.array([row[number] for row in counts.values()], dtype=float)
        ax.barh(np.arange(len(counts)), values, left=left, color=colour, height=0.62)
        for place, (value, start) in enumerate(zip(values, left, strict=True)):
            if value:
                ax.text(start + value / 2, place, f"{value:.0f}", fontsize=8.5, ha="center", va="center")
        left += values
    ax.set_yticks(range(len(counts)), list(counts))
    ax.invert_yaxis()
    ax.set(xlabel="columns of the table", title="column by column")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    return ax


def plot_differences(intervals: Mapping[str, Interval], ax: Axes, *, reference: str) -> Axes:
    """Draw the difference in error of each line to a reference with its interval; left of zero is better.

    Args:
        intervals: Intervals as ``paired_difference(line, reference)`` returns them, by name, from top to bottom.
        ax: Axes to draw on.
        reference: Name of the reference.
    """
    colours = {"better": RIGHT, "worse": WRONG, "tie": MUTED}
    for place, interval in enumerate(intervals.values()):
        low, middle, high = (100 * share for share in (interval.low, interval.difference, interval.high))
        colour = colours[interval.verdict]
        ax.plot([low, high], [place, place], color=colour, linewidth=2.4, solid_capstyle="round")
        ax.scatter([middle], [place], s=34, color=colour, edgecolors="white", zorder=3)
        text: Any = {"xytext": (6, 0), "textcoords": "offset points", "fontsize": 9, "va": "center"}
        ax.annotate(f"{middle:+.1f}", (high, place), **text)
    ax.axvline(0, color=INK, linewidth=1.0)
    ax.set_yticks(range(len(intervals)), list(intervals))
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set(xlabel=f"points of error more (+) or less (-) than {reference}", title="over all columns")
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.grid(axis="x", color=FAINT, linewidth=0.7)
    return ax


def plot_stream(labels: npt.ArrayLike, ax: Axes | None = None) -> Axes:
    """Draw the class of each sample against its place in the stream.

    Args:
        labels: Labels in the order of the stream, `labels[order]`.
        ax: Axes to draw on; those of a new figure by default.

    Returns:
        The axes; `ax.figure.savefig(path)` saves the picture.

    Example:
        >>> plot_stream([0, 0, 1, 1]).get_ylabel()
        'class'
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    values = np.asarray(labels)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"labels must be a non-empty 1-D array, got shape {values.shape}")
    if ax is None:
        ax = Figure(figsize=(8, 2.5), layout="constrained").subplots()
    # One bitmap instead of a path for each sample keeps vector files small.
    ax.plot(np.arange(values.size), values, linestyle="none", marker="|", markersize=4, rasterized=True)
    ax.set(xlabel="sample", ylabel="class", xlim=(-0.5, values.size - 0.5))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    return ax
