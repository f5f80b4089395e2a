"""A long page: sections of tables, figures and facts, with contents, and links from numbers to where they come from."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ttvd.report.export import WRITERS
from ttvd.report.page import Exhibit, Table, fill


@dataclass(frozen=True)
class Text:
    """Paragraphs."""

    kind: ClassVar[str] = "text"

    paragraphs: Sequence[str]


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    kind: ClassVar[str] = "facts"

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Code:
    """Text of a file or a command."""

    kind: ClassVar[str] = "code"

    text: str


@dataclass(frozen=True)
class Notice:
    """A sentence that must not be missed; ``good`` where it is no warning."""

    kind: ClassVar[str] = "notice"

    text: str
    good: bool = False


@dataclass(frozen=True)
class Fold:
    """What only some readers want to see.

    Attributes:
        title: What can be unfolded.
        blocks: What is inside.
        note: Small print beside the title.
        anchor: Name that links lead to.
    """

    kind: ClassVar[str] = "fold"

    title: str
    blocks: Sequence[Block]
    note: str = ""
    anchor: str = ""


@dataclass(frozen=True)
class Part:
    """Blocks under a heading."""

    kind: ClassVar[str] = "part"

    title: str
    blocks: Sequence[Block]


Block = Text | Facts | Code | Notice | Fold | Part | Table | Exhibit


@dataclass(frozen=True)
class Section:
    """A chapter of the page, with an entry in the contents.

    Attributes:
        title: Its heading.
        anchor: Name that links lead to.
        blocks: What it holds.
        printed: Whether it goes on paper.
    """

    title: str
    anchor: str
    blocks: Sequence[Block]
    printed: bool = True


@dataclass(frozen=True)
class Document:
    """All that a page holds.

    Attributes:
        title: Its heading.
        lead: Paragraphs below it.
        figures: The most important numbers and what they are.
        facts: How the numbers were made.
        notices: What must not be missed.
        sections: The chapters.
        tags: Of the rows of tables, which readers can hide; empty for none.
        footer: The last line.
    """

    title: str
    lead: Sequence[str]
    figures: Sequence[tuple[str, str]]
    facts: Sequence[tuple[str, str]]
    notices: Sequence[Notice]
    sections: Sequence[Section]
    tags: Sequence[str] = ()
    footer: str = ""


def render_document(document: Document) -> str:
    """The page as HTML. All texts are escaped.

    Example:
        >>> section = Section("Results", "results", [Text(["a < b"])])
        >>> "a &lt; b" in render_document(Document("Title", [], [], [], [], [section]))
        True
    """
    return fill("document.html.jinja", document=document, save_as=_save_as)


def find_tables(document: Document) -> list[Table]:
    """The tables that have a name, in the order of the page."""
    return [
        block
        for section in document.sections
        for block in _walk(section.blocks)
        if isinstance(block, Table) and block.name
    ]


def _walk(blocks: Sequence[Block]) -> Iterator[Block]:
    for block in blocks:
        yield block
        if isinstance(block, Fold | Part):
            yield from _walk(block.blocks)


def _save_as(table: Table) -> list[tuple[str, str, str]]:
    """For each format: what it is called, the name of the file, and the file as a data URI."""
    return [
        (
            suffix,
            f"{table.name}.{suffix}",
            "data:text/plain;base64," + base64.b64encode(write(table).encode()).decode("ascii"),
        )
        for suffix, write in WRITERS.items()
    ]
