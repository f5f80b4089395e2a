"""Opening the file of a store: what may be wrong is found before anything is changed."""

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from ttvd.bench.store.errors import PATIENCE, StoreError, explained, primary_code
from ttvd.bench.store.schema import check_pages, create_tables, is_store

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "fuse.")
_SETTINGS = ("trusted_schema=OFF", "cell_size_check=ON", "foreign_keys=ON", "synchronous=FULL")
_NEEDS_WRITING = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)


def open_database(path: Path, *, create: bool, readonly: bool) -> sqlite3.Connection:
    """Open a store.

    Writers use a write-ahead log, so that readers and writers do not wait for each other. On network file systems,
    whose machines cannot share the memory that it needs, and wherever else it is not possible, SQLite's rollback
    journal is used: as safe, but readers then wait for writers.

    Args:
        path: The file.
        create: Make a store where there is no file, or an empty one.
        readonly: Refuse to change anything; works on read-only files and folders too.

    Raises:
        FileNotFoundError: There is no store, or no folder to make it in.
        IsADirectoryError: The path is a folder.
        StoreError: The file is not a store, is damaged, or cannot be used in this way.
    """
    there = _look(path, create)
    with explained(path):
        checked = not there or _inspect(path)
        db = _connect_reader(path) if readonly else _connect(path, f"mode={'rwc' if create else 'rw'}")
        try:
            made = is_store(db, path) if readonly else _prepare(db, path, create)
            if not made:
                raise FileNotFoundError(f"{path} is empty: no store was made in it; `ttvd bench` makes one")
            if not checked:
                check_pages(db, path)
            if not readonly:
                _choose_journal(db, path)
        except BaseException:
            db.close()
            raise
        return db


def _look(path: Path, create: bool) -> bool:
    """Whether there is a file with something in it."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file in it, e.g. {path / 'runs.db'}")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"cannot use the store {path}: there is no folder {path.parent}; make it first"
        )
    if not path.exists():
        if not create:
            raise FileNotFoundError(f"there is no store {path}; `ttvd bench` makes one")
        return False
    return path.stat().st_size > 0


def _connect(path: Path, mode: str, *more: str) -> sqlite3.Connection:
    """A connection with our settings (and more) that has been able to read."""
    # Threads may share it: Database lets one in at a time.
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?{mode}",
        uri=True, timeout=PATIENCE, isolation_level=None, check_same_thread=False,
    )  # fmt: skip
    try:
        for setting in (*_SETTINGS, *more):
            db.execute(f"PRAGMA {setting}")
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        db.close()
        raise
    return db


def _inspect(path: Path) -> bool:
    """Find damage through a connection that cannot write: closing another one could move its log into the file.

    Returns:
        Whether that was possible. In a read-only folder it may not be, nor where a killed writer left a journal that
        only a writer can take back.
    """
    try:
        with closing(_connect(path, "mode=ro")) as db:
            if is_store(db, path):
                check_pages(db, path)
    except sqlite3.Error as error:
        if primary_code(error) not in _NEEDS_WRITING:
            raise
        return False
    return True


def _connect_reader(path: Path) -> sqlite3.Connection:
    """A connection that changes no data.

    It is opened for writing where that is possible, because only then SQLite removes its files beside the store when
    it is closed.
    """
    try:
        return _connect(path, "mode=rw", "query_only=ON")
    except sqlite3.Error as error:
        if primary_code(error) not in _NEEDS_WRITING:
            raise
        real = path.resolve()  # SQLite keeps its files where the file is, not where a link to it is
        for log in (real.with_name(real.name + end) for end in ("-wal", "-journal")):
            if log.exists() and log.stat().st_size > 0:
                raise StoreError(
                    f"the store {path} was not closed in order and its folder is read-only: copy it together with "
                    f"{log.name} to a folder that can be written, and use it there"
                ) from error
        # There is no log, so nobody is writing; should somebody begin now, the digests of the runs tell.
        return _connect(path, "immutable=1")


def _prepare(db: sqlite3.Connection, path: Path, create: bool) -> bool:
    """Make the tables if needed, in a transaction, so that of many processes one does; shows what is read-only."""
    db.execute("BEGIN IMMEDIATE")
    try:
        made = is_store(db, path)
        if made:
            db.execute("DELETE FROM claims WHERE 0")  # on a read-only file BEGIN is silent, this is not
        elif create:
            create_tables(db)
        db.execute("COMMIT" if made or create else "ROLLBACK")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    return made or create


def _choose_journal(db: sqlite3.Connection, path: Path) -> None:
    """The write-ahead log where it can be, else the rollback journal; see :func:`open_database`."""
    wanted = "delete" if _is_on_network(path) else "wal"
    give_up = time.monotonic() + 5
    while db.execute("PRAGMA journal_mode").fetchone()[0] != wanted:
        try:
            db.execute(f"PRAGMA journal_mode={wanted}")
            return  # SQLite leaves the mode as it was where the file system cannot do it
        except sqlite3.OperationalError:
            # Others are using the store in the other mode, which works too.
            if time.monotonic() > give_up:
                return
            time.sleep(0.02)


def _is_on_network(path: Path) -> bool:
    """Whether a file lies on a network file system, where the system tells."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = [line.partition(" - ")[2] for line in lines if line.split()[2] == number]
    return any(kind.startswith(_NETWORK) for kind in kinds)
