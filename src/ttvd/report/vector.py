"""Figures as SVG files that can be committed: the same drawing gives the same bytes, and they are small."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from ttvd.report.style import house_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUMBER = re.compile(r"-?\d+\.\d+")
_PLACES = re.compile(r' (?:d|x|y|points)="[^"]*"|translate\([^)]*\)')
_NAME = re.compile(r'\bid="([^"]+)"')


def to_svg(figure: Figure, comment: str = "") -> bytes:
    """A figure as SVG, coordinates with two digits, names by order: nothing depends on the last bits of numbers.

    Args:
        figure: Drawn.
        comment: XML that stands at the beginning of the file, after its declaration.

    Example:
        >>> from matplotlib.figure import Figure
        >>> to_svg(Figure(figsize=(1, 1))) == to_svg(Figure(figsize=(1, 1)))
        True
    """
    buffer = io.BytesIO()
    with house_style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = _PLACES.sub(lambda found: _NUMBER.sub(_round, found[0]), buffer.getvalue().decode())
    names = {name: f"n{number}" for number, name in enumerate(dict.fromkeys(_NAME.findall(text)))}
    text = re.sub(
        r'(\bid="|#)([\w-]+)(?=["\)])', lambda found: found[1] + names.get(found[2], found[2]), text
    )
    first, *lines = (line.rstrip() for line in text.splitlines())
    return "\n".join([first, *([comment] if comment else []), *lines]).encode() + b"\n"


def _round(found: re.Match[str]) -> str:
    text = f"{float(found[0]):.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
