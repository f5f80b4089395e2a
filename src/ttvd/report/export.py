"""Documents as Markdown, and tables as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Callable, Sequence

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
    Pairs,
    Provenance,
    Table,
    Terms,
    Text,
)

_MARKDOWN = re.compile(r"([\\`*_\[\]<>|])")
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "\u2013": "--",
    "\u2014": "---",
    "\u2212": "$-$",
    "\u00d7": r"$\times$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "†": r"\textdagger{}",
    **{sign: f"\\{sign}" for sign in "_%&#${}"},
}


def render_markdown(document: Document) -> tuple[str, dict[str, bytes]]:
    """Render a document as Markdown.

    Names and values in tables are escaped. Sentences may hold Markdown of their own, but no HTML.

    Args:
        document: The document. Highlights, tags and the footer belong to pages and are left out.

    Returns:
        The text, and the SVG of each picture by the name of its file in the folder ``figures``.

    Example:
        >>> from ttvd.report.document import Section
        >>> print(render_markdown(Document("Title", [], [Section("Results", "", [Text(["a < b"])])]))[0], end="")
        # Title
        <BLANKLINE>
        ## Results
        <BLANKLINE>
        a \\< b
    """
    pictures: dict[str, bytes] = {}
    parts = [f"# {_prose(document.title)}", *map(_prose, document.lead)]
    parts += [_render_block(notice, 3, pictures) for notice in document.notices]
    parts += [_render_facts(document.facts)] if document.facts else []
    for section in document.sections:
        parts.append(f"## {_prose(section.title)}")
        parts += [_render_block(block, 3, pictures) for block in section.blocks]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n", pictures


def _render_block(block: Block, level: int, pictures: dict[str, bytes]) -> str:
    """Render a block; ``level`` is that of headings inside it, and its pictures are added to ``pictures``."""
    if isinstance(block, Text):
        return "\n\n".join(map(_prose, block.paragraphs))
    if isinstance(block, Facts):
        return _render_facts(block.pairs)
    if isinstance(block, Terms):
        return "\n".join(f"- **{_prose(name)}**: {_render_value(value)}" for name, value in block.pairs)
    if isinstance(block, Code):
        return f"```\n{block.text.replace('```', '` ` `')}\n```"
    if isinstance(block, Notice):
        return f"**{_prose(block.text)}**"
    if isinstance(block, Provenance):
        facts = " ".join(f"{_prose(name)}: {_render_value(value)}." for name, value in block.facts)
        return f"> `{block.command}`. {facts}"
    if isinstance(block, Table):
        return f"{to_markdown(block)}\n{_prose(block.caption)}"
    if isinstance(block, Figure):
        return _render_figure(block, level, pictures)
    inner = [_render_block(item, level + 1, pictures) for item in block.blocks]
    note = [_prose(block.note)] if isinstance(block, Fold) else []
    return "\n\n".join(part for part in [f"{'#' * level} {_prose(block.title)}", *note, *inner] if part)


def _render_figure(figure: Figure, level: int, pictures: dict[str, bytes]) -> str:
    name = figure.name or re.sub(r"\W+", "-", figure.title.lower()).strip("-")
    single = sum(len(row.panels) for row in figure.rows) == 1
    parts = [f"{'#' * level} {_prose(figure.title)}" if figure.title else "", _prose(figure.caption)]
    number = 0
    for row in figure.rows:
        parts.append(_prose(row.heading))
        for panel in row.panels:
            number += 1
            stem = name if single else f"{name}-{number}"
            pictures[f"{stem}.svg"] = panel.svg
            parts.append(f"![{stem}](figures/{stem}.svg)")
    return "\n\n".join(filter(None, [*parts, _prose(figure.details)]))


def _render_facts(pairs: Pairs) -> str:
    rows = [f"| {_prose(name)} | {_render_value(value, cell=True)} |" for name, value in pairs]
    return "\n".join(["| | |", "|---|---|", *rows])


def _render_value(value: str | Code | Link, *, cell: bool = False) -> str:
    if isinstance(value, Link):
        return f"[{_escape_markdown(value.text)}]({value.target})"
    text = f"`{value.text}`" if isinstance(value, Code) else _prose(value)
    return text.replace("|", "\\|") if cell else text


def _prose(text: str) -> str:
    """Return a sentence without HTML; Markdown in it is kept."""
    return text.replace("<", "\\<")


def to_markdown(table: Table) -> str:
    """Write a table as Markdown: the best numbers in bold, standard deviations beside the numbers.

    Example:
        >>> print(to_markdown(Table(["method", "error"], [[Cell("a|b", "a|b"), Cell("20.5", 20.5, best=True)]])))
        | method | error |
        |---|---:|
        | a\\|b | **20.5** |
        <BLANKLINE>
    """
    lines = [
        _join_markdown([_escape_markdown(name) for name in _join_headings(table)]),
        "|" + "|".join("---" if is_text else "---:" for is_text in table.text_columns()) + "|",
        *(_join_markdown([_show_markdown(cell) for cell in row]) for row in table.rows),
    ]
    return "\n".join(lines) + "\n"


def _join_markdown(entries: Sequence[str]) -> str:
    return "| " + " | ".join(entries) + " |"


def _escape_markdown(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def _show_markdown(cell: Cell) -> str:
    text = _escape_markdown(cell.text)
    if cell.link and not cell.link.startswith("#"):
        text = f"[{text}]({cell.link})"
    shown = f"**{text}**" if cell.best else f"<u>{text}</u>" if cell.marked else text
    return f"{shown} {_note(cell, _escape_markdown)}".strip()


def to_latex(table: Table) -> str:
    """Write a table for LaTeX with the package booktabs; special characters are escaped.

    Example:
        >>> table = Table(["method", "error"], [[Cell("a_b", "a_b"), Cell("20.5", 20.5, best=True)]])
        >>> print(to_latex(table).splitlines()[-3])
        a\\_b & \\textbf{20.5} \\\\
    """
    layout = "".join("l" if is_text else "r" for is_text in table.text_columns())
    lines = [f"\\begin{{tabular}}{{{layout}}}", r"\toprule"]
    if table.spans:
        lines += _span_latex(table.spans)
    lines.append(_join_latex([escape_latex(_join_note(h.text, h.note)) for h in table.full_headings()]))
    lines += [r"\midrule", *(_join_latex([_show_latex(cell) for cell in row]) for row in table.rows)]
    caption = f"% {escape_latex(table.caption)}\n" if table.caption else ""
    return caption + "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def escape_latex(text: str) -> str:
    """Escape a text for LaTeX; letters outside ASCII become their nearest plain letters.

    Example:
        >>> escape_latex("50 % of a_b & c#d ± é")
        '50 \\\\% of a\\\\_b \\\\& c\\\\#d $\\\\pm$ e'
    """
    return "".join(_LATEX.get(sign) or _to_ascii(sign) for sign in text)


def _to_ascii(sign: str) -> str:
    if sign.isascii():
        return sign if sign.isprintable() else " "
    plain = unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode() or "?"
    return "".join(_LATEX.get(letter, letter) for letter in plain)


def _join_latex(entries: Sequence[str]) -> str:
    return " & ".join(entries) + r" \\"


def _show_latex(cell: Cell) -> str:
    text = escape_latex(cell.text)
    shown = f"\\textbf{{{text}}}" if cell.best else f"\\underline{{{text}}}" if cell.marked else text
    note = _note(cell, escape_latex)
    return f"{shown} {{\\scriptsize {note}}}" if note else shown


def _span_latex(spans: Sequence[tuple[str, int]]) -> list[str]:
    heads, rules, start = [], [], 1
    for text, width in spans:
        heads.append(f"\\multicolumn{{{width}}}{{c}}{{{escape_latex(text)}}}")
        rules += [f"\\cmidrule(lr){{{start}-{start + width - 1}}}"] if text else []
        start += width
    return [_join_latex(heads), " ".join(rules)]


def to_csv(table: Table) -> str:
    """Write a table as CSV: numbers with all digits, and small print in columns of its own.

    Example:
        >>> print(to_csv(Table(["method", "error"], [[Cell("bn", "bn"), Cell("20.5", 20.512, note="±0.2")]])), end="")
        method,error,error ±
        bn,20.512,0.2
    """
    has_notes = [any(row[number].note for row in table.rows) for number in range(len(table.headings))]
    header: list[str] = []
    for name, heading, has_note in zip(_join_headings(table), table.full_headings(), has_notes, strict=True):
        under = f"{name} ±" if heading.under == "±" else heading.under
        header += [name, under] if has_note else [name]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([_escape_formula(name) for name in header])
    for row in table.rows:
        entries: list[str] = []
        for cell, has_note in zip(row, has_notes, strict=True):
            entries.append(_show_csv(cell))
            entries += [_escape_formula(cell.note.removeprefix("±").strip())] if has_note else []
        writer.writerow(entries)
    return buffer.getvalue()


def _show_csv(cell: Cell) -> str:
    """Return the number behind a text that is a number, else the text: an interval, a name."""
    if cell.value == "":
        return ""
    try:
        float(cell.text)
    except ValueError:
        return _escape_formula(cell.text)
    return cell.text if isinstance(cell.value, str) else f"{cell.value:.10g}"


def _escape_formula(text: str) -> str:
    """Return a text that a spreadsheet does not take for a formula. Numbers and intervals stay as they are."""
    is_formula = re.match(r"[=@\t\r]|[+-](?![\d\s.,%+-]*(?:to[\d\s.,%+-]*)?$)", text)
    return f"'{text}" if is_formula else text


WRITERS: dict[str, Callable[[Table], str]] = {"csv": to_csv, "md": to_markdown, "tex": to_latex}
"""Functions that write a table, by the suffix of the file."""


def _join_headings(table: Table) -> list[str]:
    """Return each heading in one line, with the heading above it and the small print below it."""
    above = [text for text, width in table.spans for _ in range(width)] or [""] * len(table.headings)
    names = [_join_note(heading.text, heading.note) for heading in table.full_headings()]
    return [f"{group}: {name}" if group else name for group, name in zip(above, names, strict=True)]


def _join_note(text: str, note: str) -> str:
    return " ".join(f"{text} ({note})".split() if note else text.split())


def _note(cell: Cell, escape: Callable[[str], str]) -> str:
    """Return the small print of a cell: a standard deviation as it is, anything else in brackets."""
    note = escape(cell.note)
    return note if not note or cell.note.startswith("±") else f"({note})"
