"""One kind of row for all benchmarks, printed as one table and written as CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """What was measured; None where a column does not apply.

    Attributes:
        group: Name of a group of rows: a network, or a benchmark.
        name: A method, or what grows.
        setting: Batch size, number of classes and the like.
        ms: Milliseconds of a step.
        images: A second.
        floor: Time of a step by that of its floor.
        plain: Time of a plain eager step by ours.
        public: Time of the public code's step by ours.
        megabytes: Peak memory of a step.
        memory: The same by that of the floor.
        geometry: Share of the time of a step.
        note: Remark.
    """

    group: str
    name: str
    setting: str = ""
    ms: float | None = None
    images: float | None = None
    floor: float | None = None
    plain: float | None = None
    public: float | None = None
    megabytes: float | None = None
    memory: float | None = None
    geometry: float | None = None
    note: str = ""


_COLUMNS = {
    "name": ("", 28, ""),
    "setting": ("", 18, ""),
    "ms": ("ms", 10, "g"),
    "images": ("images/s", 10, "g"),
    "floor": ("x floor", 8, ".2f"),
    "plain": ("plain /", 8, ".1f"),
    "public": ("public /", 9, ".1f"),
    "megabytes": ("MB", 9, "g"),
    "memory": ("x floor", 8, ".2f"),
    "geometry": ("geometry", 9, ".1%"),
    "note": ("", 0, ""),
}


class Table:
    """Prints rows as they come, and keeps them.

    Args:
        caption: Printed above.
    """

    def __init__(self, caption: str) -> None:
        self.caption = caption
        self.rows: list[Row] = []
        self.notes: list[str] = []
        print(caption)
        print("".join(_align(title, name, width) for name, (title, width, _) in _COLUMNS.items()))

    def add(self, row: Row) -> None:
        """Print a row, under a heading if its group is new."""
        if not self.rows or self.rows[-1].group != row.group:
            print(row.group)
        self.rows.append(row)
        print(format_row(row), flush=True)

    def extend(self, rows: Iterable[Row]) -> None:
        """Print several rows."""
        for row in rows:
            self.add(row)

    def note(self, text: str) -> None:
        """Something to be said below the table, once."""
        if text not in self.notes:
            self.notes.append(text)

    def close(self, out: Path | None = None) -> None:
        """Print the notes, and write a CSV file if there is a path."""
        for text in self.notes:
            print(text)
        if out is not None:
            write_rows(out, self.rows)


def format_row(row: Row) -> str:
    """A row as a line of text."""
    cells = []
    for name, (_, width, form) in _COLUMNS.items():
        value = getattr(row, name)
        text = "" if value is None else shorten(value) if form == "g" else format(value, form)
        cells.append(_align(text, name, width))
    return "".join(cells).rstrip()


def _align(text: str, name: str, width: int) -> str:
    if name == "name":
        return f"  {text:{width - 2}}"
    if name == "setting":
        return f"{text:{width}}"
    return f"  {text}" if name == "note" else f"{text:>{width}}"


def shorten(value: float) -> str:
    """A number with three digits, without an exponent.

    Example:
        >>> [shorten(value) for value in (0.01234, 12.345, 123456.0)]
        ['0.0123', '12.3', '123,000']
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write a CSV file; empty where nothing was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [column.name for column in fields(Row)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for row in rows:
            values = (getattr(row, name) for name in names)
            writer.writerow(["" if value is None else value for value in values])
