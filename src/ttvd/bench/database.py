"""The SQLite file of a store: tables, opening, transactions, and errors that say what to do."""

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

FORMAT = 2
"""Number of the table layout (``PRAGMA user_version``). A store of any other format is refused."""

APPLICATION = int.from_bytes(b"ttvd", "big")
"""Marks the file as a store of ttvd in its header (``PRAGMA application_id``)."""

CHECK_UP_TO = 2**30
"""Stores of up to this many bytes are checked completely when they are opened, which takes seconds at most."""

TIMEOUT = 30.0
"""Seconds to wait for another process that is writing."""

TABLES = (
    """CREATE TABLE runs (
        key TEXT PRIMARY KEY NOT NULL,
        spec TEXT NOT NULL,        -- JSON
        facts TEXT NOT NULL,       -- JSON
        bins INTEGER NOT NULL,     -- confidence bins in each row of batches
        digest TEXT NOT NULL,      -- SHA-256 of the whole run
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
        failed REAL NOT NULL,
        digest TEXT NOT NULL       -- SHA-256 of the row, here and below
    )""",
    """CREATE TABLE recipes (
        name TEXT PRIMARY KEY NOT NULL,
        text TEXT NOT NULL,        -- TOML
        digest TEXT NOT NULL
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
        digest TEXT NOT NULL,
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
        digest TEXT NOT NULL,
        PRIMARY KEY (recipe, name)
    )""",
)
_NAMES = {text.split()[2] for text in TABLES}
_PRAGMAS = ("trusted_schema=OFF", "cell_size_check=ON", "foreign_keys=ON", "synchronous=FULL")
_NEEDS_WRITING = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "fuse.")

_MESSAGES = {
    sqlite3.SQLITE_BUSY: (
        f"another process has kept the store {{path}} locked for {TIMEOUT:.0f} s; wait for it or end it"
    ),
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
    sqlite3.SQLITE_CORRUPT: (
        "the store {path} is damaged ({error}); it was left as it is. Restore an earlier copy, or save what can be "
        'read with: sqlite3 "{path}" .recover | sqlite3 NEW; or begin a new store, which costs only the runs'
    ),
}


class StoreError(OSError):
    """A store cannot be used as asked. The message says why and what to do."""


class Database:
    """An open store file. Threads may share it.

    Writers use a write-ahead log, so that readers and writers do not wait for each other. SQLite's rollback journal
    is used on network file systems, whose machines cannot share the memory that the log needs, and wherever else the
    log is not possible. The journal is as safe, but readers then wait for writers.

    Args:
        path: Path of the file.
        create: Make a store where there is no file, or an empty one.
        readonly: Refuse to change anything. This works on read-only files and folders too.

    Raises:
        FileNotFoundError: There is no store, or no folder to make it in.
        IsADirectoryError: The path is a folder.
        StoreError: The file is not a store, is damaged, or cannot be used in this way.
    """

    def __init__(self, path: Path, *, create: bool, readonly: bool) -> None:
        self.path = path
        self.readonly = readonly
        self._lock = threading.RLock()
        with explain_errors(path):
            self._db = _open(path, create=create and not readonly, readonly=readonly)
        self._identity = path.stat()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Give the connection for a read transaction: the database as it is at one moment."""
        with self._lock, explain_errors(self.path), _transaction(self._db, "BEGIN"):
            yield self._db

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Give the connection for a write transaction: all is written at the end, or nothing."""
        if self.readonly:
            raise StoreError(f"the store {self.path} was opened for reading only")
        with self._lock, explain_errors(self.path):
            self._check_place()
            with _transaction(self._db, "BEGIN IMMEDIATE"):
                yield self._db

    def _check_place(self) -> None:
        """Refuse to write to a file that was deleted: SQLite would go on, and all of it would be lost."""
        try:
            same = os.path.samestat(os.stat(self.path), self._identity)
        except FileNotFoundError:
            same = False
        if not same:
            raise StoreError(
                f"the store {self.path} was deleted or replaced while it was in use; start again"
            )


@contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Turn the errors of SQLite inside the block into a :class:`StoreError`."""
    try:
        yield
    except UnicodeDecodeError as error:  # damage in the names of tables, which the message of SQLite repeats
        text = _MESSAGES[sqlite3.SQLITE_CORRUPT]
        raise StoreError(text.format(path=path, error="its text is not UTF-8")) from error
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        text = _MESSAGES.get(_primary_code(error), "the store {path} cannot be used: {error} ({name})")
        raise StoreError(text.format(path=path, error=error, name=name)) from error


def _primary_code(error: sqlite3.Error) -> int:
    """Return SQLite's error code without its details, and -1 for an error of Python's module itself."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return -1 if code is None else code & 0xFF


@contextmanager
def _transaction(db: sqlite3.Connection, begin: str) -> Iterator[None]:
    try:
        db.execute(begin)
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _open(path: Path, *, create: bool, readonly: bool) -> sqlite3.Connection:
    """Open a store. Whatever may be wrong with it is found before anything is changed."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file in it, e.g. {path / 'runs.db'}")
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} is not a store: it is no file (a pipe or a device); give another name")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"cannot use the store {path}: there is no folder {path.parent}; make it first"
        )
    if not create and not path.exists():
        raise FileNotFoundError(f"there is no store {path}; `ttvd bench` makes one")
    checked = not path.exists() or path.stat().st_size == 0 or _inspect(path)
    db = _connect_reader(path) if readonly else _connect(path, f"mode={'rwc' if create else 'rw'}")
    try:
        with _transaction(db, "BEGIN" if readonly else "BEGIN IMMEDIATE"):
            if not _has_tables(db, path):
                if not create:
                    raise FileNotFoundError(
                        f"{path} is empty: no store was made in it; `ttvd bench` makes one"
                    )
                _create_tables(db)  # within the transaction: of many processes that try, one does
            elif not readonly:
                db.execute("DELETE FROM claims WHERE 0")  # on a read-only file BEGIN is silent, this is not
        if not checked:
            _check_pages(db, path)
        if not readonly:
            _choose_journal(db, path)
    except BaseException:
        db.close()
        raise
    return db


def _connect(path: Path, mode: str, *pragmas: str) -> sqlite3.Connection:
    """Connect, and make sure that the file can be read."""
    # Threads may share the connection: Database lets one in at a time.
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?{mode}",
        uri=True, timeout=TIMEOUT, isolation_level=None, check_same_thread=False,
    )  # fmt: skip
    try:
        for pragma in (*_PRAGMAS, *pragmas):
            db.execute(f"PRAGMA {pragma}")
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        db.close()
        raise
    return db


def _inspect(path: Path) -> bool:
    """Look for damage through a connection that cannot write: closing another one could move its log into the file.

    Returns:
        Whether that was possible. It may not be in a read-only folder, nor where a killed writer left a journal that
        only a writer can take back.
    """
    try:
        with closing(_connect(path, "mode=ro")) as db:
            if _has_tables(db, path):
                _check_pages(db, path)
    except sqlite3.Error as error:
        if _primary_code(error) not in _NEEDS_WRITING:
            raise
        return False
    return True


def _connect_reader(path: Path) -> sqlite3.Connection:
    """Connect for reading.

    The file is opened for writing where that is possible, because only then SQLite removes its files beside the store
    when it is closed.
    """
    try:
        return _connect(path, "mode=rw", "query_only=ON")
    except sqlite3.Error as error:
        if _primary_code(error) not in _NEEDS_WRITING:
            raise
        real = path.resolve()  # SQLite keeps its files beside the file itself, not beside a link to it
        for log in (real.with_name(real.name + end) for end in ("-wal", "-journal")):
            if log.exists() and log.stat().st_size > 0:
                raise StoreError(
                    f"the store {path} was not closed in order and its folder is read-only: copy it together with "
                    f"{log.name} to a folder that can be written, and use it there"
                ) from error
        # Without a log nobody is writing. Should somebody begin now, the digests of the runs tell.
        return _connect(path, "immutable=1")


def _has_tables(db: sqlite3.Connection, path: Path) -> bool:
    """Return whether the tables are there; False for an empty database.

    Raises:
        StoreError: The file belongs to another program or has another format.
        sqlite3.DatabaseError: Tables are missing.
    """
    application, number = (_get_value(db, f"PRAGMA {name}") for name in ("application_id", "user_version"))
    found = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if application == 0 and not found:
        return False
    if application != APPLICATION:
        raise StoreError(f"{path} is not a store: it is an SQLite file of another program; give another name")
    if number != FORMAT:
        advice = (
            "upgrade ttvd (pip install --upgrade ttvd)"
            if number > FORMAT
            else "go on with the version of ttvd that wrote it"
        )
        raise StoreError(
            f"the store {path} has format {number}, and this ttvd uses format {FORMAT}: {advice}, or use another "
            "store"
        )
    if missing := sorted(_NAMES - found):
        raise _damage(f"tables are missing: {', '.join(missing)}")
    return True


def _check_pages(db: sqlite3.Connection, path: Path) -> None:
    """Let SQLite look at every page and reference, unless the store is so large that this takes long."""
    if path.stat().st_size > CHECK_UP_TO:
        return
    found = _get_value(db, "PRAGMA integrity_check(1)")
    if found != "ok":
        raise _damage(" ".join(str(found).split()))
    for table, _, parent, _ in db.execute("PRAGMA foreign_key_check"):
        raise _damage(f"rows of the table {table} belong to rows of {parent} that are gone")


def _damage(detail: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(detail)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def _get_value(db: sqlite3.Connection, query: str) -> Any:
    (value,) = db.execute(query).fetchone()
    return value


def _create_tables(db: sqlite3.Connection) -> None:
    for text in TABLES:
        db.execute(text)
    db.execute(f"PRAGMA application_id={APPLICATION}")
    db.execute(f"PRAGMA user_version={FORMAT}")


def _choose_journal(db: sqlite3.Connection, path: Path) -> None:
    """Use the write-ahead log where that is possible, else the rollback journal."""
    wanted = "delete" if _is_on_network(path) else "wal"
    give_up = time.monotonic() + 5
    while _get_value(db, "PRAGMA journal_mode") != wanted:
        try:
            db.execute(f"PRAGMA journal_mode={wanted}")
            return  # SQLite leaves the mode as it was where the file system cannot do it
        except sqlite3.OperationalError:
            # Others are using the store in the other mode, which works too.
            if time.monotonic() > give_up:
                return
            time.sleep(0.02)


def _is_on_network(path: Path) -> bool:
    """Return whether a file lies on a network file system, where the operating system tells."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = [line.partition(" - ")[2] for line in lines if line.split()[2] == number]
    return any(kind.startswith(_NETWORK) for kind in kinds)
