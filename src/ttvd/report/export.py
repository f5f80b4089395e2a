"""Tables as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Callable, Sequence

from ttvd.report.page import Cell, Table

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


def to_markdown(table: Table) -> str:
    """For a README: the best in bold, spreads beside the numbers.

    Example:
        >>> print(to_markdown(Table(["method", "error"], [[Cell("a|b", "a|b"), Cell("20.5", 20.5, best=True)]])))
        | method | error |
        |---|---:|
        | a\\|b | **20.5** |
        <BLANKLINE>
    """
    words = table.wordy()
    lines = [
        _join([_escape_markdown(name) for name in _full_headings(table)]),
        "|" + "|".join("---" if word else "---:" for word in words) + "|",
        *(_join([_show_markdown(cell) for cell in row]) for row in table.rows),
    ]
    return "\n".join(lines) + "\n"


def to_latex(table: Table) -> str:
    """For a paper, with the package booktabs; everything special is escaped.

    Example:
        >>> table = Table(["method", "error"], [[Cell("a_b", "a_b"), Cell("20.5", 20.5, best=True)]])
        >>> print(to_latex(table).splitlines()[-3])
        a\\_b & \\textbf{20.5} \\\\
    """
    layout = "".join("l" if word else "r" for word in table.wordy())
    lines = [f"\\begin{{tabular}}{{{layout}}}", r"\toprule"]
    if table.spans:
        lines += _span_latex(table.spans)
    lines.append(_end([escape_latex(_plain(heading.text, heading.note)) for heading in table.titles()]))
    lines += [r"\midrule", *(_end([_show_latex(cell) for cell in row]) for row in table.rows)]
    caption = f"% {escape_latex(table.caption)}\n" if table.caption else ""
    return caption + "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def to_csv(table: Table) -> str:
    """For programs: numbers with all their digits, and what stands below a number in a column of its own.

    Example:
        >>> print(to_csv(Table(["method", "error"], [[Cell("bn", "bn"), Cell("20.5", 20.512, note="±0.2")]])), end="")
        method,error,error ±
        bn,20.512,0.2
    """
    noted = [any(row[number].note for row in table.rows) for number in range(len(table.headings))]
    header: list[str] = []
    for name, heading, has_note in zip(_full_headings(table), table.titles(), noted, strict=True):
        under = f"{name} ±" if heading.under == "±" else heading.under
        header += [name, under] if has_note else [name]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([_tame(name) for name in header])
    for row in table.rows:
        entries: list[str] = []
        for cell, has_note in zip(row, noted, strict=True):
            entries.append(_show_csv(cell))
            entries += [_tame(cell.note.removeprefix("±").strip())] if has_note else []
        writer.writerow(entries)
    return buffer.getvalue()


WRITERS: dict[str, Callable[[Table], str]] = {"csv": to_csv, "md": to_markdown, "tex": to_latex}


def escape_latex(text: str) -> str:
    """Text that LaTeX sets as it is; letters that it may not know become their nearest plain ones.

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


def _full_headings(table: Table) -> list[str]:
    """Headings with those above them and the small print below them, in a line each."""
    above = [text for text, width in table.spans for _ in range(width)] or [""] * len(table.headings)
    names = [_plain(heading.text, heading.note) for heading in table.titles()]
    return [f"{group}: {name}" if group else name for group, name in zip(above, names, strict=True)]


def _plain(text: str, note: str) -> str:
    return " ".join(f"{text} ({note})".split() if note else text.split())


def _join(entries: Sequence[str]) -> str:
    return "| " + " | ".join(entries) + " |"


def _end(entries: Sequence[str]) -> str:
    return " & ".join(entries) + r" \\"


def _escape_markdown(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def _show_markdown(cell: Cell) -> str:
    text = _escape_markdown(cell.text)
    shown = f"**{text}**" if cell.best else f"<u>{text}</u>" if cell.marked else text
    return f"{shown} {_note(cell, _escape_markdown)}".strip()


def _show_latex(cell: Cell) -> str:
    text = escape_latex(cell.text)
    shown = f"\\textbf{{{text}}}" if cell.best else f"\\underline{{{text}}}" if cell.marked else text
    note = _note(cell, escape_latex)
    return f"{shown} {{\\scriptsize {note}}}" if note else shown


def _note(cell: Cell, escape: Callable[[str], str]) -> str:
    """A spread stands beside its number; other small print in brackets."""
    note = escape(cell.note)
    return note if not note or cell.note.startswith("±") else f"({note})"


def _span_latex(spans: Sequence[tuple[str, int]]) -> list[str]:
    heads, rules, start = [], [], 1
    for text, width in spans:
        heads.append(f"\\multicolumn{{{width}}}{{c}}{{{escape_latex(text)}}}")
        rules += [f"\\cmidrule(lr){{{start}-{start + width - 1}}}"] if text else []
        start += width
    return [_end(heads), " ".join(rules)]


def _show_csv(cell: Cell) -> str:
    """The number behind a text that is one, else the text: an interval, a number with a dagger, a name."""
    if cell.value == "":
        return ""
    try:
        float(cell.text)
    except ValueError:
        return _tame(cell.text)
    return cell.text if isinstance(cell.value, str) else f"{cell.value:.10g}"


def _tame(text: str) -> str:
    """Text that a spreadsheet does not take for a formula."""
    return f"'{text}" if re.match(r"[=@]|[+-][^\d.]", text) else text
