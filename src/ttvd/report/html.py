"""A document as one HTML page: styles, script and pictures are inside, and nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
from pathlib import Path

from ttvd.bench.store import check_name
from ttvd.files import open_atomic
from ttvd.report.document import Document, Table
from ttvd.report.export import WRITERS


def render_html(document: Document) -> str:
    """Render a document as HTML. All texts are escaped.

    Example:
        >>> from ttvd.report.document import Section, Text
        >>> "a &lt; b" in render_html(Document("Title", [], [Section("Results", "results", [Text(["a < b"])])]))
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
    template = environment.get_template("page.html.jinja")
    helpers = {
        "kind": lambda block: type(block).__name__.lower(),
        "downloads": _list_downloads,
        "embed": _embed_svg,
    }
    return template.render(document=document, **helpers).lstrip()


def write_report(document: Document, folder: Path, page: str = "index.html") -> list[Path]:
    """Write a document as a page, and its tables as CSV, Markdown and LaTeX files beside it.

    Args:
        document: The document.
        folder: Folder to write to; it is created if needed. The tables go into its subfolder ``tables``.
        page: Name of the page's file.

    Returns:
        The paths that were written, that of the page first.

    Raises:
        ValueError: The name of a table would leave the folder; nothing is written then.
    """
    files = {folder / page: render_html(document)}
    for table in document.tables():
        check_name(table.name)
        for suffix, write in WRITERS.items():
            files[folder / "tables" / f"{table.name}.{suffix}"] = write(table)
    for path, text in files.items():
        with open_atomic(path, sync=False) as file:
            file.write(text.encode())
    return list(files)


def _embed_svg(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")


def _list_downloads(table: Table) -> list[tuple[str, str, str]]:
    """For each format, return its suffix, the name of the file, and the file as a data URI."""
    return [
        (
            suffix,
            f"{table.name}.{suffix}",
            "data:text/plain;base64," + base64.b64encode(write(table).encode()).decode("ascii"),
        )
        for suffix, write in WRITERS.items()
    ]
