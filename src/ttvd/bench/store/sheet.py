"""The file that packed runs lie in: lines of cells, each with a digest, and the recipe that they belong to."""

import csv
import hashlib
import io
import json
import threading
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ttvd.bench.store.packed import COLUMNS, seal
from ttvd.files import open_atomic

AGAIN = (
    "take it from version control again, or delete it and pack the store again: ttvd runs STORE --pack FOLDER"
)
_WORDS = ("title", "note")  # of a recipe: they say nothing of its runs
_LIMIT = threading.Lock()  # the csv module has one limit for all threads


def read_meaning(text: str, name: str) -> dict[str, Any]:
    """What a recipe asks for: its entries without title and note.

    Raises:
        ValueError: The text is not TOML.

    Example:
        >>> read_meaning('title = "One"  # a comment\\nseeds = [0]', "one")
        {'seeds': [0]}
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"recipe {name} is not TOML: {error}") from error
    return {key: value for key, value in document.items() if key not in _WORDS}


def digest_recipe(text: str, name: str) -> str:
    """A digest of what a recipe asks for; comments, the order of tables, title and note do not change it."""
    meaning = json.dumps(read_meaning(text, name), sort_keys=True, default=str)
    return hashlib.sha256(meaning.encode()).hexdigest()[:16]


def read_lines(path: Path, recipe: str) -> list[tuple[int, dict[str, str]]]:
    """Numbers and cells of the lines of a packed file, each checked.

    Args:
        path: The .csv file.
        recipe: Digest of the recipe that lies beside it.

    Raises:
        ValueError: The file or its recipe was damaged or edited, or it is of another kind.
    """
    found = []
    for number, row in _read_rows(path):
        cells = dict(zip(COLUMNS, row, strict=False))
        if len(row) != len(COLUMNS) or seal(cells) != cells["digest"]:
            raise ValueError(f"line {number} of {path} was damaged or edited; {AGAIN}")
        if cells["recipe"] != recipe:
            beside = path.with_suffix(".toml")
            raise ValueError(
                f"{beside} is not the recipe that {path.name} was packed with: more than its title and note was "
                f"edited; take it from version control again, or change the recipe, measure and pack anew"
            )
        found.append((number, cells))
    return found


def write_lines(path: Path, lines: Iterable[Mapping[str, str]]) -> None:
    """Write a packed file."""
    with open_atomic(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        usual, quoted = (
            csv.writer(text, lineterminator="\n", quoting=kind) for kind in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)
        )
        usual.writerow(COLUMNS)
        for line in lines:
            cells = [line[name] for name in COLUMNS]
            # A carriage return ends a line for the reader, and the writer does not know that.
            (quoted if any("\r" in cell for cell in cells) else usual).writerow(cells)
        text.detach()


def _read_rows(path: Path) -> list[tuple[int, list[str]]]:
    """Rows after the header, each with the number of its last line."""
    try:
        text = path.read_bytes().decode()
        # The counts of a long stream at batch size 1 are longer than what csv takes at first.
        with _LIMIT:
            before = csv.field_size_limit()
            csv.field_size_limit(max(before, len(text)))
            try:
                reader = csv.reader(io.StringIO(text, newline=""), strict=True)
                _check_header(next(reader, []), path)
                return [(reader.line_num, row) for row in reader]
            finally:
                csv.field_size_limit(before)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as CSV ({error}); {AGAIN}") from error


def _check_header(header: Sequence[str], path: Path) -> None:
    if header == list(COLUMNS):
        return
    if not {"key", "asked", "digest"} <= set(header):
        raise ValueError(f"{path} holds no packed runs; ttvd runs STORE --pack FOLDER writes them")
    odd = sorted(set(header) ^ set(COLUMNS))
    raise ValueError(
        f"{path} was packed by another version of ttvd: columns differ ({', '.join(odd) or 'order'})"
    )
