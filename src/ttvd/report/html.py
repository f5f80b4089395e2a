"""What pages are made of, and how they become HTML: pictures, styles and script are inside, nothing is loaded."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

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

    kind: ClassVar[str] = "exhibit"

    title: str
    caption: str
    strips: Sequence[Strip]
    key: Sequence[tuple[str, str]] = ()
    details: str = ""


@dataclass(frozen=True)
class Cell:
    """An entry of a table.

    Attributes:
        text: What is shown.
        value: What it is sorted by; an empty string where there is nothing, which always comes last.
        best: Whether it is the best of its column.
        note: Small print below it, such as the spread over seeds.
        hint: Where it comes from, in a line, shown on hover.
        link: Place on the page where that is told in full, such as ``"#runs"``.
        marked: Whether it is the best of its column among those that the caption speaks of.
        tone: ``"better"`` or ``"worse"`` for a change, which then has a colour.
    """

    text: str
    value: float | str
    best: bool = False
    note: str = ""
    hint: str = ""
    link: str = ""
    marked: bool = False
    tone: str = ""


MISSING = Cell("-", "", hint="no run")
"""Where a number should be and is not."""


@dataclass(frozen=True)
class Heading:
    """Of a column.

    Attributes:
        text: Its name.
        note: Small print below it.
        under: What the small print below the cells is, for files that give it a column of its own.
    """

    text: str
    note: str = ""
    under: str = "±"


@dataclass(frozen=True)
class Table:
    """A table that readers can sort.

    Attributes:
        headings: One for each column.
        rows: Of cells.
        caption: What it shows.
        spans: Headings above the headings, each with the number of columns below it; empty for none.
        anchors: Names of the rows that links lead to; empty for none.
        name: Of the files that hold this table; tables without a name are on the page only.
        heads: Whether the first cell of each row is its heading, which stays in sight.
        tags: Of the rows, by which readers can hide some; empty for none.
    """

    kind: ClassVar[str] = "table"

    headings: Sequence[str | Heading]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    spans: Sequence[tuple[str, int]] = ()
    anchors: Sequence[str] = ()
    name: str = ""
    heads: bool = False
    tags: Sequence[str] = ()

    def titles(self) -> list[Heading]:
        """The headings, all in their full form."""
        return [Heading(heading) if isinstance(heading, str) else heading for heading in self.headings]

    def wordy(self) -> list[bool]:
        """For each column: whether it holds words, which are set to the left.

        Example:
            >>> Table(["method", "error"], [[Cell("bn", "bn"), Cell("0.5", 0.5)]]).wordy()
            [True, False]
        """
        return [
            any(isinstance(row[number].value, str) and row[number].value for row in self.rows)
            for number in range(len(self.headings))
        ]


@dataclass(frozen=True)
class Page:
    """All that the demo's page holds.

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
    return fill("demo.html.jinja", page=page)


def fill(template: str, **values: Any) -> str:
    """A template of this package with values, all of which are escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("ttvd.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)
