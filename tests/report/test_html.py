"""Documents as pages and as Markdown: everything inside, all texts escaped."""

import re
from html.parser import HTMLParser

import pytest
from matplotlib.axes import Axes

from ttvd.report.document import (
    Block,
    Cell,
    Code,
    Document,
    Facts,
    Figure,
    Fold,
    Link,
    Notice,
    Panel,
    PanelRow,
    Part,
    Provenance,
    Section,
    Table,
    Terms,
    Text,
)
from ttvd.report.export import render_markdown
from ttvd.report.html import render_html
from ttvd.report.style import figure_style, new_panel, to_svg

HOSTILE = "<script>alert('x')</script>"


def draw() -> Axes:
    with figure_style():
        ax = new_panel()
        ax.plot([0, 1], [0, 1])
    return ax


@pytest.fixture(scope="module")
def svg() -> bytes:
    return to_svg(draw())


class Reader(HTMLParser):
    """Collects the elements of a page, and what they refer to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]


def make_document(svg: bytes, text: str) -> Document:
    """One of each block, with the same text everywhere."""
    table = Table(
        [text], [[Cell("?", "")], [Cell(text, 0.5, best=True, note=text, hint=text)]], text, name="t"
    )
    figure = Figure(text, text, [PanelRow([Panel(svg, text)], 4, text)], [("#ffffff", text)], text, "picture")
    blocks: list[Block] = [
        Text([text]),
        Facts([(text, text), ("Command", Code(text)), ("Rows", Link(text, "rows/x.csv"))]),
        Terms([(text, text)]),
        Code(text),
        Notice(text),
        Provenance(text, [(text, text)]),
        Fold(text, [Part(text, [table])], text),
        figure,
    ]
    return Document(text, [text], [Section(text, "s", blocks)], [("1", text)], [(text, text)], [Notice(text)])


def test_pictures_are_the_same_bytes_every_time(svg: bytes) -> None:
    assert to_svg(draw()) == svg
    assert b"<svg" in svg


def test_a_page_stands_alone_and_escapes_all_texts(svg: bytes) -> None:
    html = render_html(make_document(svg, HOSTILE))
    reader = Reader(html)
    inside = ("data:", "#s", "rows/x.csv")
    assert all(reference.startswith(inside) for reference in reader.references)
    assert {"iframe", "object", "embed"}.isdisjoint(reader.tags)
    assert reader.tags.count("script") == 1
    assert "alert(" in html
    assert HOSTILE not in html
    assert "http" not in re.sub(r'"data:[^"]*"', "", html)
    assert html.startswith("<!doctype html>")


def test_blocks_are_on_the_page(svg: bytes) -> None:
    html = render_html(make_document(svg, "words"))
    for part in (
        '<td data-value="0.5" class="best" title="words">words<small>words</small></td>',
        "<dd><code>words</code></dd>",
        '<a href="rows/x.csv">words</a>',
        '<dl class="terms">',
        '<p class="notice">words</p>',
        '<details class="fold">',
        'alt="words"',
        "data:image/svg+xml;base64,",
        'download="t.csv"',
    ):
        assert part in html


def test_blocks_are_in_markdown(svg: bytes) -> None:
    text, pictures = render_markdown(make_document(svg, "words"))
    assert pictures == {"picture.svg": svg}
    for part in (
        "# words\n",
        "## words\n",
        "### words\n",
        "#### words\n",
        "| Command | `words` |",
        "[words](rows/x.csv)",
        "- **words**: words",
        "> `words`. words: words.",
        "![picture](figures/picture.svg)",
        "| **words** (words) |",
        "```\nwords\n```",
    ):
        assert part in text


def test_markdown_holds_no_html_of_others(svg: bytes) -> None:
    text, _ = render_markdown(make_document(svg, HOSTILE))
    outside = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    assert "alert" in outside
    assert not re.search(r"(?<!\\)<script", outside)


def test_a_figure_of_several_panels_has_a_file_for_each(svg: bytes) -> None:
    figure = Figure("Two panels", "", [PanelRow([Panel(svg, "a"), Panel(svg, "b")], 2)])
    text, pictures = render_markdown(Document("x", [], [Section("y", "", [figure])]))
    assert list(pictures) == ["two-panels-1.svg", "two-panels-2.svg"]
    assert all(f"figures/{name}" in text for name in pictures)
