"""The document model: what a report holds, independent of the format that it is written in.

A `Document` has sections, and a section has blocks: texts, facts, tables, figures and a few others. ``report.html``
renders a document as one page, ``report.export`` as Markdown, and its tables as Markdown, LaTeX and CSV.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """The text of a file, a command or a log."""

    text: str


@dataclass(frozen=True)
class Link:
    """A link to another file."""

    text: str
    target: str


Pairs = Sequence[tuple[str, str | Code | Link]]


@dataclass(frozen=True)
class Text:
    """Paragraphs."""

    paragraphs: Sequence[str]


@dataclass(frozen=True)
class Facts:
    """Names and short values."""

    pairs: Pairs


@dataclass(frozen=True)
class Terms:
    """Terms and the sentences that explain them."""

    pairs: Pairs


@dataclass(frozen=True)
class Notice:
    """A sentence that readers must not miss; ``good`` if it is not a warning."""

    text: str
    good: bool = False


@dataclass(frozen=True)
class Provenance:
    """How the numbers of the next block were made: the command, and names and values."""

    command: str
    facts: Pairs


@dataclass(frozen=True)
class Fold:
    """Blocks that are hidden until a reader opens them.

    Attributes:
        title: Title of the fold.
        blocks: Contents.
        note: Small print beside the title.
        anchor: Name that links point to.
    """

    title: str
    blocks: Sequence[Block]
    note: str = ""
    anchor: str = ""


@dataclass(frozen=True)
class Part:
    """Blocks under a heading."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Panel:
    """A picture.

    Attributes:
        svg: The picture as ``ttvd.report.style.to_svg`` returns it.
        text: Alternative text: what the picture shows.
    """

    svg: bytes
    text: str


@dataclass(frozen=True)
class PanelRow:
    """Panels side by side.

    Attributes:
        panels: The pictures.
        columns: Number of pictures in a row of a wide window.
        heading: Heading of the row.
    """

    panels: Sequence[Panel]
    columns: int
    heading: str = ""


@dataclass(frozen=True)
class Figure:
    """A figure.

    Attributes:
        title: Title of the figure.
        caption: What the figure shows, in plain sentences.
        rows: Rows of pictures.
        key: Colours (or ``"ring"``) and their meanings.
        details: How the figure was made, in small print below it.
        name: Name of the file for formats that keep pictures in files of their own.
    """

    title: str
    caption: str
    rows: Sequence[PanelRow]
    key: Sequence[tuple[str, str]] = ()
    details: str = ""
    name: str = ""


@dataclass(frozen=True)
class Cell:
    """An entry of a table.

    Attributes:
        text: Text to show.
        value: Value to sort by; an empty string means "missing" and is always sorted last.
        best: Whether it is the best of its column.
        note: Small print below the text, such as the standard deviation over seeds.
        hint: Tooltip.
        link: Anchor of the place that describes the runs behind the number, such as ``"#runs"``.
        marked: Whether it is the best of its column among the lines that the caption names.
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
"""A number that should be there and is not."""


def text_cell(text: str, **options: str) -> Cell:
    """Return a cell that shows a text and is sorted by it."""
    return Cell(text, text, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Heading:
    """The heading of a column.

    Attributes:
        text: Name of the column.
        note: Small print below the name.
        under: Name of the small print of the cells, for files that give it a column of its own.
    """

    text: str
    note: str = ""
    under: str = "±"


@dataclass(frozen=True)
class Table:
    """A table that readers can sort.

    Attributes:
        headings: One heading for each column.
        rows: Rows of cells.
        caption: What the table shows.
        spans: Headings above the headings, each with its number of columns; empty for none.
        anchors: Anchors of the rows; empty for none.
        name: Name of the files that hold this table; a table without a name is on the page only.
        heads: Whether the first cell of each row is its heading, which stays visible when readers scroll.
        tags: Tags of the rows, by which readers can hide some; empty for none.
    """

    headings: Sequence[str | Heading]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    spans: Sequence[tuple[str, int]] = ()
    anchors: Sequence[str] = ()
    name: str = ""
    heads: bool = False
    tags: Sequence[str] = ()

    def full_headings(self) -> list[Heading]:
        """Return all headings as `Heading`."""
        return [Heading(heading) if isinstance(heading, str) else heading for heading in self.headings]

    def text_columns(self) -> list[bool]:
        """For each column, return whether it holds texts, which are aligned to the left.

        Example:
            >>> Table(["method", "error"], [[Cell("bn", "bn"), Cell("0.5", 0.5)]]).text_columns()
            [True, False]
        """
        return [
            any(isinstance(row[number].value, str) and row[number].value for row in self.rows)
            for number in range(len(self.headings))
        ]


Block = Text | Facts | Terms | Code | Notice | Provenance | Fold | Part | Table | Figure


@dataclass(frozen=True)
class Section:
    """A section with an entry in the table of contents.

    Attributes:
        title: Heading of the section.
        anchor: Name that links point to.
        blocks: Contents.
        printed: Whether the section is printed on paper.
    """

    title: str
    anchor: str
    blocks: Sequence[Block]
    printed: bool = True


@dataclass(frozen=True)
class Document:
    """A whole report.

    Attributes:
        title: Title of the document.
        lead: Paragraphs below the title.
        sections: The sections.
        highlights: The most important numbers, and what they are.
        facts: How the numbers were made.
        notices: Sentences that readers must not miss.
        tags: Tags of table rows that readers can hide; empty for none.
        footer: The last line.
    """

    title: str
    lead: Sequence[str]
    sections: Sequence[Section]
    highlights: Sequence[tuple[str, str]] = ()
    facts: Pairs = ()
    notices: Sequence[Notice] = ()
    tags: Sequence[str] = ()
    footer: str = ""

    def tables(self) -> list[Table]:
        """Return the tables that have a name, in the order of the document."""
        blocks = (block for section in self.sections for block in _walk(section.blocks))
        return [block for block in blocks if isinstance(block, Table) and block.name]


def _walk(blocks: Sequence[Block]) -> Iterator[Block]:
    for block in blocks:
        yield block
        if isinstance(block, Fold | Part):
            yield from _walk(block.blocks)
