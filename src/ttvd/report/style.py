"""One palette and one typography for all figures, and SVG files whose bytes are reproducible.

The palette stays readable on a projector and for readers who confuse red and green.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1b2733"
MUTED = "#8494a3"
FAINT = "#d9e0e6"
RIGHT = "#009e73"
WRONG = "#c1272d"

# Okabe and Ito's colours (Color Universal Design, 2008), darkest first; three classes get the first three.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#5c4b37")

PANEL = (3.6, 3.75)
"""Size in inches of a square picture with a title above it."""

DPI = 192
"""Resolution of rasterised parts: two pixels for each pixel of a page."""

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
_NUMBER = re.compile(r"-?\d+\.\d+")
_COORDINATES = re.compile(r' (?:d|x|y|points)="[^"]*"|translate\([^)]*\)')
_ID = re.compile(r'\bid="([^"]+)"')


@contextmanager
def figure_style() -> Iterator[None]:
    """Draw and save figures in the style of the reports; afterwards matplotlib's settings are restored.

    Example:
        >>> with figure_style():
        ...     ax = new_panel()
        >>> ax.figure.get_size_inches().tolist()
        [3.6, 3.75]
    """
    import matplotlib

    with matplotlib.rc_context(_RC):
        yield


def new_panel(size: tuple[float, float] = PANEL) -> Axes:
    """Return the axes of a new figure that is ``size`` inches wide and high."""
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained").subplots()


def class_colour(label: int) -> str:
    """Return the colour of a class; the colours repeat after eight classes.

    Example:
        >>> class_colour(1)
        '#d55e00'
    """
    return PALETTE[label % len(PALETTE)]


def line_colours(names: Sequence[str], *, baseline: str = "source") -> dict[str, str]:
    """Return a colour for each name in order; the baseline is grey.

    Example:
        >>> line_colours(["source", "bn"])
        {'source': '#8494a3', 'bn': '#0072b2'}
    """
    coloured = [name for name in names if name != baseline]
    colours = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(coloured)}
    return {name: colours.get(name, MUTED) for name in names}


def lighten(colour: str, share: float) -> str:
    """Mix a colour with white; a share of 1 gives white.

    Example:
        >>> lighten("#000000", 1.0)
        '#ffffff'
    """
    channels = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * share):02x}" for c in channels)


def to_svg(drawing: Axes | Figure) -> bytes:
    """Save a figure, or the figure that holds some axes, as SVG.

    Coordinates have two digits and ids are numbered, so files are small and the same drawing gives the same bytes.

    Example:
        >>> from matplotlib.figure import Figure
        >>> to_svg(Figure(figsize=(1, 1))) == to_svg(Figure(figsize=(1, 1)))
        True
    """
    from matplotlib.figure import Figure

    figure = drawing if isinstance(drawing, Figure) else drawing.get_figure(root=True)
    assert figure is not None
    buffer = io.BytesIO()
    with figure_style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = _COORDINATES.sub(lambda found: _NUMBER.sub(_round, found[0]), buffer.getvalue().decode())
    ids = {name: f"n{number}" for number, name in enumerate(dict.fromkeys(_ID.findall(text)))}
    text = re.sub(r'(\bid="|#)([\w-]+)(?=["\)])', lambda found: found[1] + ids.get(found[2], found[2]), text)
    return "\n".join(line.rstrip() for line in text.splitlines()).encode() + b"\n"


def _round(found: re.Match[str]) -> str:
    text = f"{float(found[0]):.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
