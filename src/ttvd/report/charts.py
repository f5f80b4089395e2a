"""Pictures of whole tables: error against cost, what is kept over time, and differences with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ttvd.report.curves import place_points, spread
from ttvd.report.style import FAINT, INK, MUTED, RIGHT, WRONG, lighten, line_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ttvd.bench.compare import Interval

Floats = npt.NDArray[np.float64]
GLYPH = 0.62
"""Mean width of a letter of the house's font, as a share of its size."""

SCORES = {"better": lighten(RIGHT, 0.25), "tie": FAINT, "worse": lighten(WRONG, 0.45)}
"""Colours of wins, ties and losses."""


@dataclass(frozen=True)
class Point:
    """A method in a picture of two numbers that should both be low."""

    name: str
    x: float
    y: float


def plot_tradeoff(
    points: Sequence[Point], ax: Axes, *, colours: Mapping[str, str] | None = None, log: bool = False
) -> Axes:
    """Draw two numbers of each method against each other; steps join those that nothing beats in both.

    Args:
        points: The methods.
        ax: Axes to draw on.
        colours: Of those that stand out, by name; the others are grey. All are named where there is room.
        log: Whether x is drawn on a logarithmic scale.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = plot_tradeoff([Point("bn", 0.1, 40), Point("tent", 0.3, 30)], Figure().subplots(), log=True)
        >>> ax.get_xscale(), [text.get_text() for text in ax.texts]
        ('log', ['bn', 'tent'])
    """
    colours = colours or {}
    front = find_front(points)
    steps: Any = {"color": FAINT, "linewidth": 3, "zorder": 1, "drawstyle": "steps-post"}
    ax.plot([point.x for point in front], [point.y for point in front], **steps)
    for point in points:
        colour = colours.get(point.name, MUTED)
        ax.scatter([point.x], [point.y], s=48, color=colour, edgecolors="white", zorder=3)
    if log:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(_plain_number)
        ax.xaxis.set_minor_formatter(_round_number)
    ax.margins(x=0.16, y=0.1)
    ax.autoscale_view()
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color=FAINT, linewidth=0.7)
    ranks = {name: rank for rank, name in enumerate(colours)}  # the first of the colours is named first
    _name_points(sorted(points, key=lambda p: ranks.get(p.name, len(ranks))), ax, colours)
    return ax


def _plain_number(value: float, _: Any = None) -> str:
    return f"{value:g}"


def _round_number(value: float, _: Any = None) -> str:
    """Names for 2 and 5 of each decade, which leave room between them."""
    return f"{value:g}" if f"{value:.0e}"[0] in "25" else ""


def find_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both numbers, from left to right.

    Example:
        >>> [p.name for p in find_front([Point("a", 1, 5), Point("b", 2, 6), Point("c", 3, 2)])]
        ['a', 'c']
    """
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.x, p.y)):
        if not front or point.y < front[-1].y:
            front.append(point)
    return front


def _name_points(points: Sequence[Point], ax: Axes, colours: Mapping[str, str]) -> None:
    """Put names beside points where they hide nothing; a name for which there is no room is left out."""
    size = 9.0
    taken = [_box(ax, point, 8.0, 8.0, (0.0, 0.0)) for point in points]
    left = ax.bbox.x0 * 72 / ax.get_figure(root=True).dpi  # type: ignore[union-attr]
    for point in points:
        wide, high = GLYPH * size * len(point.name), 1.25 * size
        for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)):
            shift = (dx * (wide / 2 + 6), dy * (high / 2 + 5))
            box = _box(ax, point, wide, high, shift)
            if box[0] > left and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                ax.annotate(
                    point.name,
                    (point.x, point.y),
                    xytext=shift,
                    textcoords="offset points",
                    ha="center",
                    va="center",
                    fontsize=size,
                    color=colours.get(point.name, INK),
                )
                break


def _box(ax: Axes, point: Point, wide: float, high: float, shift: tuple[float, float]) -> Floats:
    """Left, low, right and high edge in points of the page."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    x, y = ax.transData.transform((point.x, point.y)) * 72 / figure.dpi + shift
    return np.array([x - wide / 2, y - high / 2, x + wide / 2, y + high / 2])


def _overlap(one: Floats, other: Floats) -> bool:
    return bool((one[:2] < other[2:]).all() and (other[:2] < one[2:]).all())


def plot_scores(counts: Mapping[str, tuple[int, int, int]], ax: Axes) -> Axes:
    """Draw in how many columns each line is better than, as good as and worse than the reference.

    Args:
        counts: Wins, ties and losses, by name, from top to bottom.
        ax: Axes to draw on.
    """
    from matplotlib.ticker import MaxNLocator

    left = np.zeros(len(counts))
    for number, colour in enumerate(SCORES.values()):
        values = np.array([row[number] for row in counts.values()], dtype=float)
        ax.barh(np.arange(len(counts)), values, left=left, color=colour, height=0.62)
        for place, (value, start) in enumerate(zip(values, left, strict=True)):
            if value:
                middle = start + value / 2
                ax.text(middle, place, f"{value:.0f}", fontsize=8.5, ha="center", va="center")
        left += values
    ax.set_yticks(range(len(counts)), list(counts))
    ax.invert_yaxis()
    ax.set(xlabel="columns of the table", title="column by column")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    return ax


def plot_kept(
    shares: Mapping[str, Floats],
    ax: Axes,
    *,
    colours: Mapping[str, str] | None = None,
    batches: int | None = None,
) -> Axes:
    """Draw the share of each batch that took part in the steps, each line named at its end.

    Args:
        shares: In [0, 1] after each batch, by name.
        ax: Axes to draw on.
        colours: Of the lines, by name; the palette's in order unless given.
        batches: How many there were, where lines have fewer points than that.
    """
    from matplotlib.ticker import MaxNLocator

    colours = line_colours(list(shares)) if colours is None else colours
    last = batches or max(len(values) for values in shares.values())
    places = spread([100 * float(values[-1]) for values in shares.values()], gap=6.0)
    for (name, values), place in zip(shares.items(), places, strict=True):
        ax.plot(place_points(values, batches), 100 * values, color=colours[name], linewidth=1.6)
        ax.text(
            last * 1.02, place, f"{name} {100 * values[-1]:.0f}", color=colours[name], fontsize=9, va="center"
        )
    ax.set(xlim=(1, last), ylim=(0, 103), xlabel="batches seen", ylabel="kept (%)")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color=FAINT, linewidth=0.7)
    return ax


def plot_differences(intervals: Mapping[str, Interval], ax: Axes, *, reference: str) -> Axes:
    """Draw the difference in error of each line to a reference, with its interval; left of zero is better.

    Args:
        intervals: As ``paired_difference(line, reference)`` gives them, by name, from top to bottom.
        ax: Axes to draw on.
        reference: Name of what the lines are compared with.
    """
    colours = {"better": RIGHT, "worse": WRONG, "tie": MUTED}
    for place, interval in enumerate(intervals.values()):
        low, middle, high = (100 * share for share in (interval.low, interval.difference, interval.high))
        colour = colours[interval.verdict]
        ax.plot([low, high], [place, place], color=colour, linewidth=2.4, solid_capstyle="round")
        ax.scatter([middle], [place], s=34, color=colour, edgecolors="white", zorder=3)
        ax.annotate(
            f"{middle:+.1f}",
            (high, place),
            xytext=(6, 0),
            textcoords="offset points",
            fontsize=9,
            va="center",
        )
    ax.axvline(0, color=INK, linewidth=1.0)
    ax.set_yticks(range(len(intervals)), list(intervals))
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set(xlabel=f"points of error more (+) or less (-) than {reference}", title="over all columns")
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.grid(axis="x", color=FAINT, linewidth=0.7)
    return ax
