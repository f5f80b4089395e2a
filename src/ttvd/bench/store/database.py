"""The open file and its transactions."""

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ttvd.bench.store.errors import StoreError, explained
from ttvd.bench.store.opening import open_database


class Database:
    """An open store file; threads may share it.

    Args:
        path: The file.
        create: Make the store if there is none.
        readonly: Refuse to change anything.
    """

    def __init__(self, path: Path, *, create: bool, readonly: bool) -> None:
        self.path = path
        self.readonly = readonly
        self._lock = threading.RLock()
        self._db = open_database(path, create=create and not readonly, readonly=readonly)
        self._identity = path.stat()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The database as it is at one moment."""
        with self._lock, explained(self.path):
            yield from self._transact("BEGIN")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The database, locked for other writers; all is written at the end, or nothing."""
        if self.readonly:
            raise StoreError(f"the store {self.path} was opened for reading only")
        with self._lock, explained(self.path):
            self._check_place()
            yield from self._transact("BEGIN IMMEDIATE")

    def _transact(self, begin: str) -> Iterator[sqlite3.Connection]:
        try:
            self._db.execute(begin)
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _check_place(self) -> None:
        """SQLite would go on writing to a file that was deleted, and all of it would be lost."""
        try:
            same = os.path.samestat(os.stat(self.path), self._identity)
        except FileNotFoundError:
            same = False
        if not same:
            raise StoreError(
                f"the store {self.path} was deleted or replaced while it was in use; start again"
            )
