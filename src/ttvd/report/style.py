"""One palette and one typography for all figures: for a projector, and for readers who confuse red and green."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#1b2733"
MUTED = "#8494a3"
FAINT = "#d9e0e6"
RIGHT = "#009e73"
WRONG = "#c1272d"

# Okabe and Ito's colours (Color Universal Design, 2008), darkest first; three classes get the first three.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#5c4b37")

PANEL = (3.6, 3.75)
"""Inches of a square picture with a title above it."""

DPI = 192
"""Of what is rasterised: two pixels for each pixel of a page."""

_RC: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture on every machine
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlecolor": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "figure.facecolor": "white",
    "savefig.dpi": DPI,
    "svg.hashsalt": "ttvd",  # the same picture gives the same file
    "svg.fonttype": "path",
}


@contextmanager
def house_style() -> Iterator[None]:
    """Draw and save inside: matplotlib's settings are this style's and afterwards what they were.

    Example:
        >>> with house_style():
        ...     ax = new_panel()
        >>> ax.figure.get_size_inches().tolist()
        [3.6, 3.75]
    """
    import matplotlib

    with matplotlib.rc_context(_RC):
        yield


def new_panel(size: tuple[float, float] = PANEL) -> Axes:
    """The axes of a new figure of its own, ``size`` inches wide and high."""
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained").subplots()


def class_colour(label: int) -> str:
    """The colour of a class; after eight classes they repeat.

    Example:
        >>> class_colour(1)
        '#d55e00'
    """
    return PALETTE[label % len(PALETTE)]


def line_colours(names: Sequence[str], *, quiet: str = "source") -> dict[str, str]:
    """A colour for each name in order; ``quiet`` is grey, because it is what the others are compared with.

    Example:
        >>> line_colours(["source", "bn"])
        {'source': '#8494a3', 'bn': '#0072b2'}
    """
    loud = [name for name in names if name != quiet]
    colours = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(loud)}
    return {name: colours.get(name, MUTED) for name in names}


def lighten(colour: str, share: float) -> str:
    """A colour mixed with white; ``share`` 1 is white.

    Example:
        >>> lighten("#000000", 1.0)
        '#ffffff'
    """
    channels = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * share):02x}" for c in channels)
