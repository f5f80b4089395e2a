"""What can be wrong with a store, in words that say what to do."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 30.0
"""Seconds to wait for another process that is writing."""

_WORDS = {
    sqlite3.SQLITE_BUSY: "another process has kept the store {path} locked for {patience:.0f} s; wait for it or end it",
    sqlite3.SQLITE_READONLY: (
        "the store {path} cannot be written: the file or its folder is read-only; change that, or copy the store to "
        "a folder that can be written"
    ),
    sqlite3.SQLITE_CANTOPEN: (
        "the store {path} cannot be opened ({error}): the file must be readable, and its folder writable, since "
        "SQLite keeps files beside it while it is in use"
    ),
    sqlite3.SQLITE_FULL: (
        "no space left for the store {path}: this was not written, all that was stored before is intact. Make room "
        "and start again; only what is missing is done"
    ),
    sqlite3.SQLITE_IOERR: (
        "the disk refused the store {path} ({error}, {name}): it may be full, over a quota, or gone. This was not "
        "written, what was stored before stays. Mend that and start again; only what is missing is done"
    ),
    sqlite3.SQLITE_PROTOCOL: (
        "the file system of {path} does not lock files ({error}): keep the store on a local disk, or on a network "
        "file system with locks"
    ),
    sqlite3.SQLITE_NOTADB: "{path} is not a store: it is not an SQLite file ({error}); give another name",
}


class StoreError(OSError):
    """A store cannot be used as asked; the message says why and what to do."""


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn the errors of SQLite inside into a :class:`StoreError`."""
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(_explain(error, path)) from error


def primary_code(error: sqlite3.Error) -> int:
    """The kind of an error: SQLite's code without the details; -1 where the error is Python's own."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return -1 if code is None else code & 0xFF


def describe_damage(path: Path, detail: str) -> str:
    """Words for a store that is damaged."""
    return (
        f"the store {path} is damaged ({detail}); it was left as it is. Take a copy from before, or save what can be "
        f'read with: sqlite3 "{path}" .recover | sqlite3 NEW; or begin a new store, which costs the runs but nothing '
        "else"
    )


def describe_bad_run(path: Path, key: str, detail: str) -> str:
    """Words for a single run that cannot be read."""
    return (
        f"run {key} in the store {path} is not what was stored ({detail}): the file was damaged or edited. To have it "
        f'done again: sqlite3 "{path}" "PRAGMA foreign_keys=ON; DELETE FROM runs WHERE key=\'{key}\'", then start '
        "the benchmark again"
    )


def _explain(error: sqlite3.Error, path: Path) -> str:
    code = primary_code(error)
    if code == sqlite3.SQLITE_CORRUPT:
        return describe_damage(path, str(error))
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    words = _WORDS.get(code, "the store {path} cannot be used: {error} ({name})")
    return words.format(path=path, error=error, name=name, patience=PATIENCE)
