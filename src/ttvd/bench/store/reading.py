"""Many runs at once: their rows are read in bulk, and one that was damaged is named."""

import gc
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from ttvd.bench.store.codec import COLUMNS, Block, Line
from ttvd.bench.store.errors import StoreError, describe_bad_run

T = TypeVar("T")
_AT_ONCE = 200  # runs in a query: SQLite limits the values that a query may have


def read_runs(
    db: sqlite3.Connection, path: Path, keys: Sequence[str], make: Callable[[Block], T]
) -> Iterator[tuple[str, T]]:
    """Those of the keys that are done, and what is made of their batches; in no particular order.

    Raises:
        StoreError: A run is not what was stored.
    """
    for first in range(0, len(keys), _AT_ONCE):
        some = keys[first : first + _AT_ONCE]
        places = ", ".join("?" * len(some))
        query = f"SELECT key, spec, facts, bins, digest FROM runs WHERE key IN ({places})"
        lines = [Line(*line) for line in db.execute(query, some)]
        query = f"SELECT {', '.join(COLUMNS)}, run FROM batches WHERE run IN ({places}) ORDER BY run, number"
        batches = {key: list(group) for key, group in groupby(db.execute(query, some), itemgetter(-1))}
        for line in lines:
            yield line.key, _make(path, line, batches.pop(line.key, []), make)


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep Python from looking for garbage among millions of new numbers again and again: that is half the time."""
    active = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if active:
            gc.enable()


def _make(path: Path, line: Line, batches: list[tuple[Any, ...]], make: Callable[[Block], T]) -> T:
    try:
        return make(Block(line, batches))
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(describe_bad_run(path, line.key, str(error))) from error
