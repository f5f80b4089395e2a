"""The tables of a store, and whether a file is one."""

import sqlite3
from pathlib import Path
from typing import Any

from ttvd.bench.store.errors import StoreError, describe_damage

VERSION = 1
"""Of the tables; it grows when they change. A store of a newer version is refused."""

APPLICATION = int.from_bytes(b"ttvd", "big")
"""Marks the file as ours in its header (``PRAGMA application_id``)."""

CHECK_UP_TO = 2**30
"""Stores up to this many bytes are checked as a whole when they are opened: a second or two at most."""

TABLES = (
    """CREATE TABLE runs (
        key TEXT PRIMARY KEY NOT NULL,
        spec TEXT NOT NULL,        -- JSON
        facts TEXT NOT NULL,       -- JSON
        bins INTEGER NOT NULL,     -- confidence bins in each row of batches
        digest TEXT NOT NULL,      -- SHA-256 of all that was stored
        added REAL NOT NULL,       -- seconds since 1970
        method TEXT NOT NULL,      -- from here on: copies from spec and facts to filter by
        checkpoint TEXT NOT NULL,
        data TEXT NOT NULL,
        domain TEXT NOT NULL,      -- in words, e.g. 'gaussian noise 5'
        stream TEXT NOT NULL,
        batch_size INTEGER NOT NULL,
        selection TEXT NOT NULL,
        seed INTEGER NOT NULL,
        device TEXT NOT NULL,
        seconds REAL
    )""",
    """CREATE TABLE batches (
        run TEXT NOT NULL REFERENCES runs (key) ON DELETE CASCADE,
        number INTEGER NOT NULL,
        domain INTEGER NOT NULL,   -- position in the domains of the spec
        n INTEGER NOT NULL,
        correct INTEGER NOT NULL,
        nll_sum REAL,
        brier_sum REAL,
        batch_ece_sum REAL,
        kept REAL,                 -- NULL stands for NaN here and above
        seconds REAL,
        bins BLOB NOT NULL,        -- 3 x bins little-endian float64: count, confidence, correct
        PRIMARY KEY (run, number)
    ) WITHOUT ROWID""",
    """CREATE TABLE failures (
        key TEXT PRIMARY KEY NOT NULL,
        spec TEXT NOT NULL,
        text TEXT NOT NULL,
        failed REAL NOT NULL
    )""",
    """CREATE TABLE recipes (
        name TEXT PRIMARY KEY NOT NULL,
        text TEXT NOT NULL         -- TOML
    )""",
    """CREATE TABLE members (
        recipe TEXT NOT NULL REFERENCES recipes (name) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        key TEXT NOT NULL,
        label TEXT NOT NULL,
        role TEXT NOT NULL,
        spec TEXT NOT NULL,
        varies TEXT NOT NULL,      -- JSON
        condition TEXT NOT NULL,   -- JSON
        PRIMARY KEY (recipe, position)
    )""",
    """CREATE TABLE claims (
        key TEXT PRIMARY KEY NOT NULL,
        host TEXT NOT NULL,
        pid INTEGER NOT NULL,
        started REAL NOT NULL,
        renewed REAL NOT NULL
    )""",
    """CREATE TABLE figures (
        recipe TEXT NOT NULL,
        name TEXT NOT NULL,
        description TEXT NOT NULL, -- JSON
        payload BLOB NOT NULL,     -- safetensors
        PRIMARY KEY (recipe, name)
    )""",
)
_NAMES = {text.split()[2] for text in TABLES}


def create_tables(db: sqlite3.Connection) -> None:
    """Make the tables; the caller holds a transaction."""
    for text in TABLES:
        db.execute(text)
    db.execute(f"PRAGMA application_id={APPLICATION}")
    db.execute(f"PRAGMA user_version={VERSION}")


def is_store(db: sqlite3.Connection, path: Path) -> bool:
    """Whether the tables are there; False for an empty database.

    Raises:
        StoreError: It belongs to another program or to a newer ttvd, or tables are missing.
    """
    application, version = (_value(db, f"PRAGMA {name}") for name in ("application_id", "user_version"))
    found = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if application == 0 and not found:
        return False
    if application != APPLICATION:
        raise StoreError(f"{path} is not a store: it is an SQLite file of another program; give another name")
    if version > VERSION:
        raise StoreError(
            f"the store {path} has version {version}, and this ttvd knows versions up to {VERSION}: upgrade ttvd "
            "(pip install --upgrade ttvd), or use another store"
        )
    if missing := sorted(_NAMES - found):
        raise StoreError(describe_damage(path, f"tables are missing: {', '.join(missing)}"))
    return True


def check_pages(db: sqlite3.Connection, path: Path) -> None:
    """Let SQLite look at every page, unless the store is so large that this takes long.

    Raises:
        StoreError: The store is damaged.
    """
    if path.stat().st_size <= CHECK_UP_TO:
        found = _value(db, "PRAGMA quick_check(1)")
        if found != "ok":
            raise StoreError(describe_damage(path, " ".join(str(found).split())))


def _value(db: sqlite3.Connection, query: str) -> Any:
    (value,) = db.execute(query).fetchone()
    return value
