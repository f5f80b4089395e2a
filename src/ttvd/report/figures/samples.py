"""Pictures of a single image: what it looks like, and how far it is from every class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ttvd.report.style import MUTED, RIGHT, WRONG

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = npt.NDArray[np.float64]


NAMED = 20
"""Up to so many classes, each has its name below its bar."""


def plot_image(pixels: Floats, ax: Axes) -> Axes:
    """Show an image in [0, 1] without ticks: grey (h, w) or (h, w, 1), or in colours (h, w, 3)."""
    if pixels.shape[2:] == (1,):
        pixels = pixels[:, :, 0]
    ax.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    return ax


def plot_bars(values: Floats, ax: Axes, *, truth: int, chosen: int, names: Sequence[str], label: str) -> Axes:
    """Draw a bar for each class: green for the true one, red for the chosen one where that is another.

    Args:
        values: (k,) distances or influences.
        ax: Axes to draw on.
        truth: The true class.
        chosen: The predicted class.
        names: Of the classes.
        label: Of the values.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> names = ["cat", "dog"]
        >>> len(plot_bars(np.array([1.0, 2.0]), ax, truth=0, chosen=1, names=names, label="distance").patches)
        2
    """
    places = np.arange(len(values))
    colours = [MUTED] * len(values)
    colours[chosen] = WRONG
    colours[truth] = RIGHT
    ax.bar(places, values, color=colours, width=0.72)
    if len(values) > NAMED:  # too thin to be seen: the two that matter are drawn again, wider
        marked = [chosen, truth] if chosen != truth else [truth]
        ax.bar(marked, values[marked], color=[colours[k] for k in marked], width=0.016 * len(values))
        ax.set_xticks(marked, [names[k] for k in marked], rotation=20, ha="right", rotation_mode="anchor")
    elif max(map(len, names)) > 2:
        ax.set_xticks(places, names, rotation=90)
    else:
        ax.set_xticks(places, names)
    ax.set(ylabel=label, xlim=(-0.6, len(values) - 0.4))
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(axis="x", length=0)
    return ax
