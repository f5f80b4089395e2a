"""One self-contained HTML page: pictures, styles and script are inside, so that it opens without a network."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ttvd.report.style import house_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Panel:
    """A picture.

    Attributes:
        source: The picture as a data URI, as :func:`encode` makes it.
        text: What it shows, for those who cannot see it.
    """

    source: str
    text: str


@dataclass(frozen=True)
class Strip:
    """Panels side by side.

    Attributes:
        panels: The pictures.
        columns: How many fit in a row of a wide window.
        heading: What they have in common.
    """

    panels: Sequence[Panel]
    columns: int
    heading: str = ""


@dataclass(frozen=True)
class Exhibit:
    """A figure of the page.

    Attributes:
        title: What it is about.
        caption: What to see, in plain sentences.
        strips: Rows of pictures.
        key: Colours (or ``"ring"``) and what they mean.
        details: How it was drawn, in small print below.
    """

    title: str
    caption: str
    strips: Sequence[Strip]
    key: Sequence[tuple[str, str]] = ()
    details: str = ""


@dataclass(frozen=True)
class Cell:
    """An entry of a table: what is shown, what it is sorted by, and whether it is the best of its column."""

    text: str
    value: float | str
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A table that readers can sort: a heading for each column, and rows of cells."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""


@dataclass(frozen=True)
class Page:
    """All that a page holds.

    Attributes:
        title: Its heading.
        lead: Paragraphs below it.
        facts: Names and values: how the numbers were made.
        table: The results.
        notes: Sentences below the table.
        terms: Words and their meanings, to unfold.
        exhibits: The figures.
    """

    title: str
    lead: Sequence[str]
    facts: Sequence[tuple[str, str]]
    table: Table
    notes: Sequence[str] = ()
    terms: Sequence[tuple[str, str]] = ()
    exhibits: Sequence[Exhibit] = ()


def encode(drawn: Axes | Figure) -> str:
    """A figure (or the one that holds the axes) as a data URI; the same drawing gives the same text.

    Example:
        >>> from matplotlib.figure import Figure
        >>> encode(Figure(figsize=(1, 1)))[:26]
        'data:image/svg+xml;base64,'
    """
    from matplotlib.figure import Figure

    figure = drawn if isinstance(drawn, Figure) else drawn.get_figure(root=True)
    assert figure is not None
    buffer = io.BytesIO()
    with house_style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def render(page: Page) -> str:
    """The page as HTML. All texts are escaped.

    Example:
        >>> page = Page("Title", ["a < b"], [], Table(["method"], [[Cell("bn", "bn")]]))
        >>> "a &lt; b" in render(page)
        True
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("ttvd.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("demo.html.jinja").render(page=page)
