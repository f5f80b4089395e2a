"""Pictures of results: how the error goes along a stream, and whether confidence means anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ttvd.metrics import Reliability
from ttvd.report.style import FAINT, INK, MUTED, PALETTE, WRONG, line_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = npt.NDArray[np.float64]


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
    """Draw the error over all samples seen so far against the number of batches, each line named at its end.

    Args:
        curves: Error in [0, 1] after each batch, by name, as ``Record.curve`` gives it.
        ax: Axes to draw on.
        top: Highest error shown. A line that ends above it is named at the upper edge, with its last value.
        bottom: Lowest error shown.
        strong: Name of the line that is drawn thicker.
        named: Whether there is room for the names; without them, colours must be explained elsewhere.
        colours: Of the lines, by name; the palette's in order unless given.
        batches: How many there were, where curves have fewer points than that.

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
    places = dict(zip(ranked, spread(heights, gap=5.4 * (top - bottom)), strict=True))
    for name, curve in curves.items():
        bold = name == strong
        points, width = place_points(curve, batches), 2.8 if bold else 1.6
        marker = "o" if len(curve) == 1 else ""  # a line of one point is not seen
        ax.plot(points, 100 * curve, color=colours[name], linewidth=width, marker=marker)
        if not named:
            continue
        text = f"{name} {ends[name]:.1f}" + (" ↑" if ends[name] > 100 * top else "")
        weight = "bold" if bold else "normal"
        ax.text(
            last * 1.02, places[name], text, color=colours[name], fontsize=9, fontweight=weight, va="center"
        )
    ax.set(
        xlim=(1, max(last, 2)),
        ylim=(100 * bottom, 100 * top),
        xlabel="batches seen",
        ylabel="error so far (%)",
    )
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color=FAINT, linewidth=0.7)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ax


def place_points(curve: Floats, batches: int | None = None) -> Floats:
    """After how many batches each point of a curve is drawn: one each, or so that the last is at ``batches``.

    Example:
        >>> place_points(np.array([0.5, 0.4, 0.3]), 6).tolist()
        [2.0, 4.0, 6.0]
    """
    return np.arange(1, len(curve) + 1, dtype=np.float64) * (1.0 if batches is None else batches / len(curve))


def spread(values: list[float], gap: float) -> list[float]:
    """Move values as little as needed upwards or downwards so that neighbours are at least ``gap`` apart.

    Their order is kept; each group of crowded values keeps its mean.

    Example:
        >>> spread([1.0, 1.0, 9.0], gap=2.0)
        [0.0, 2.0, 9.0]
    """
    order = sorted(range(len(values)), key=lambda index: values[index])
    groups: list[list[float]] = []  # each: mean of its centre, number of members
    for index in order:
        groups.append([values[index], 1.0])
        while len(groups) > 1 and groups[-1][0] - groups[-2][0] < gap * (groups[-1][1] + groups[-2][1]) / 2:
            centre, count = groups.pop()
            before, members = groups[-1]
            groups[-1] = [(centre * count + before * members) / (count + members), count + members]
    placed = [centre + gap * (i - (count - 1) / 2) for centre, count in groups for i in range(int(count))]
    moved = dict(zip(order, placed, strict=True))
    return [moved[index] for index in range(len(values))]


def plot_reliability(reliability: Reliability, ax: Axes) -> Axes:
    """Draw the accuracy of each confidence bin, its gap to the confidence, and the share of samples in the bins.

    Args:
        reliability: As ``RunningMetrics.reliability`` gives it; empty bins stay empty.
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
    ax.bar(
        left,
        gap,
        bottom=low,
        facecolor="#ffffff90",
        edgecolor=WRONG,
        hatch="////",
        label="gap to confidence",
        **bars,
    )
    ax.plot([0, 1], [0, 1], color=INK, linewidth=1.0, linestyle="--")
    share = 0.18 * count[used] / count.max()
    ax.bar(left, share, bottom=-0.2, color=MUTED, label="share of samples", **bars)
    ax.axhline(0, color=INK, linewidth=0.8)
    ax.set(xlim=(0, 1), ylim=(-0.2, 1), yticks=[0, 0.5, 1], xticks=[0, 0.5, 1], aspect="equal")
    ax.set(xlabel="confidence", ylabel="accuracy")
    ax.spines[["top", "right"]].set_visible(False)
    return ax
