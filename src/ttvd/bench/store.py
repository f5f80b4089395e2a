"""The store: finished runs, what recipes ask for, failures, claims and figures, in one SQLite file."""

import difflib
import gc
import hashlib
import json
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from ttvd.bench.database import Database
from ttvd.bench.database import StoreError as StoreError
from ttvd.bench.encoding import BATCH_COLUMNS, Header, StoredRun, encode_run, spec_from_json, to_json
from ttvd.bench.spec import Facts, Member, Run, Spec

LEASE = 120.0
"""Seconds after which a claim that was not renewed is free."""
_RUNS_PER_QUERY = 200  # SQLite limits the values that a query may have
_COPIES = (
    "method",
    "checkpoint",
    "data",
    "domain",
    "stream",
    "batch_size",
    "selection",
    "seed",
    "device",
    "seconds",
)
T = TypeVar("T")


@dataclass(frozen=True)
class Summary:
    """A finished run without its rows.

    Attributes:
        key: Key of the spec.
        spec: The run.
        metrics: Error, nll, brier, ece, batch_ece and n of the whole stream, computed from the rows.
        facts: The circumstances.
        batches: Number of batches.
        kept: Share of all samples that were used to adapt.
    """

    key: str
    spec: Spec
    metrics: dict[str, float]
    facts: Facts
    batches: int
    kept: float


@dataclass(frozen=True)
class Failure:
    """A run that has failed.

    Attributes:
        key: Key of the spec.
        spec: The run.
        text: The traceback, or what is known of a worker that died.
        when: Time of the failure in seconds since 1970; 0 where it is not known.
    """

    key: str
    spec: Spec
    text: str
    when: float


@dataclass(frozen=True)
class Figure:
    """The data that a figure is drawn from.

    Attributes:
        name: Name of the figure.
        recipe: Recipe whose page shows it.
        description: What it shows, as JSON values.
        payload: The arrays, as safetensors bytes.
    """

    name: str
    recipe: str
    description: Mapping[str, Any]
    payload: bytes


@dataclass(frozen=True)
class Owner:
    """A process that executes runs.

    Attributes:
        host: Name of the machine and of its process namespace (containers have their own).
        pid: Process id.
        started: Start of the process in seconds since the machine started. It tells the process from a later one with
            the same id. 0 where the operating system does not tell.

    Example:
        >>> Owner.current().is_alive()
        True
    """

    host: str
    pid: int
    started: float

    @classmethod
    def current(cls) -> Self:
        """Return this process."""
        state = _read_process(os.getpid())
        return cls(_get_host(), os.getpid(), 0.0 if state is None else state[1])

    def is_alive(self) -> bool:
        """Return False if the process is certainly gone. Processes of other machines count as alive."""
        if self.host != _get_host() or os.name != "posix":
            return True
        try:
            os.kill(self.pid, 0)  # sends no signal, only asks
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass  # the process exists and belongs to another user
        state = _read_process(self.pid)
        return state is None or (state[0] not in "ZX" and state[1] == self.started)


@cache
def _get_host() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()} {namespace}"


def _read_process(pid: int) -> tuple[str, float] | None:
    """Return the state letter and the start time of a process, where the operating system tells."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name of the program comes second, in brackets, and may hold anything.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19]) / os.sysconf("SC_CLK_TCK")


class Reader(Protocol):
    """Finished runs and the recipes that ask for them, in a store or in a packed file. Methods are those of `Store`."""

    path: Path

    def recipes(self) -> dict[str, str]:
        """Return the names of the recipes and their TOML."""

    def members(self, recipe: str) -> list[Member]:
        """Return the runs that a recipe asks for."""

    def done(self) -> set[str]:
        """Return the keys of the finished runs."""

    def load(self, keys: Iterable[str]) -> dict[str, Run]:
        """Return finished runs."""

    def summaries(self) -> list[Summary]:
        """Return all finished runs without their rows."""

    def failures(self) -> list[Failure]:
        """Return the runs that failed."""

    def claimed(self) -> set[str]:
        """Return the keys of the runs that a process is doing now."""

    def figures(self, recipe: str) -> list[Figure]:
        """Return the figures of a recipe."""

    def find(self, prefix: str) -> str:
        """Return the key that begins with a prefix."""


class Store:
    """Finished runs with all their rows, in one SQLite file that many processes may use at once.

    Each finished run is written in a transaction of its own: after a kill, or on a full disk, a run is there with all
    its rows or not at all. Everything has a digest, which is checked when it is read. Nothing in the file can run code.
    Threads may share a store.

    Args:
        path: Path of the file; its folder must exist.
        create: Make the store if there is none.
        readonly: Refuse to change anything; for reports, also from read-only folders.

    Raises:
        OSError: The store cannot be used; the message says why and what to do. Every method may raise this.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, Store(Path(folder, "runs.db")) as store:
        ...     store.done()
        set()
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True, readonly: bool = False) -> None:
        self.path = Path(path).absolute()
        self._database = Database(self.path, create=create, readonly=readonly)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. The store cannot be used afterwards."""
        self._database.close()

    # Runs and failures

    def add(self, run: Run) -> bool:
        """Store a finished run, and remove its failure and its claim.

        Returns:
            False when the run is there already; then nothing changes.

        Raises:
            ValueError: The record could not be read back, e.g. because it has no rows.
        """
        header, batches = encode_run(run)
        columns = (*header, time.time(), *_list_copies(run.spec, run.facts))
        with self._database.writing() as db:
            query = f"INSERT INTO runs VALUES ({_placeholders(columns)}) ON CONFLICT (key) DO NOTHING"
            if db.execute(query, columns).rowcount == 0:
                return False
            rows = [(header.key, *batch) for batch in batches]
            db.executemany(f"INSERT INTO batches VALUES ({_placeholders(rows[0])})", rows)
            for table in ("failures", "claims"):
                db.execute(f"DELETE FROM {table} WHERE key = ?", (header.key,))
        return True

    def fail(self, spec: Spec, text: str) -> None:
        """Store how a run failed, unless it is done. The failure stays until the run succeeds; so does the claim."""
        key = spec.key
        # Names of files need not be UTF-8, texts of the database must be.
        text = text.encode(errors="backslashreplace").decode()
        with self._database.writing() as db:
            if db.execute("SELECT 1 FROM runs WHERE key = ?", (key,)).fetchone() is None:
                row = (key, to_json(spec.document()), text, time.time())
                db.execute("REPLACE INTO failures VALUES (?, ?, ?, ?, ?)", _add_digest(row))

    def done(self) -> set[str]:
        """Return the keys of the finished runs."""
        with self._database.reading() as db:
            return {key for (key,) in db.execute("SELECT key FROM runs")}

    def load(self, keys: Iterable[str]) -> dict[str, Run]:
        """Return runs with all their rows, equal to those that were added. Keys that are not done are left out."""
        wanted = list(dict.fromkeys(keys))
        with self._database.reading() as db, _without_garbage_collection():
            found = dict(self._read_runs(db, wanted, StoredRun.run))
        return {key: found[key] for key in wanted if key in found}

    def summaries(self) -> list[Summary]:
        """Return all finished runs without their rows, in the order in which they were added."""

        def summarize(run: StoredRun) -> Summary:
            return Summary(run.header.key, run.spec, run.metrics(), run.facts, len(run.numbers), run.kept())

        with self._database.reading() as db:
            keys = [key for (key,) in db.execute("SELECT key FROM runs ORDER BY added, key")]
            found = dict(self._read_runs(db, keys, summarize))
        return [found[key] for key in keys]

    def failures(self) -> list[Failure]:
        """Return the runs that failed and have not succeeded since, the first failure first."""
        with self._database.reading() as db:
            rows = db.execute("SELECT * FROM failures ORDER BY failed, key").fetchall()
        return [
            Failure(key, spec_from_json(spec), text, when)
            for key, spec, text, when in self._check_digests(rows, "failures")
        ]

    def find(self, prefix: str) -> str:
        """Return the key that begins with a prefix, among all runs that are done, failed or asked for by a recipe.

        Raises:
            ValueError: No key begins with the prefix, or several do.
        """
        query = " UNION ".join(
            f"SELECT key FROM {table} WHERE substr(key, 1, ?1) = ?2"
            for table in ("runs", "failures", "members")
        )
        with self._database.reading() as db:
            keys: list[str] = sorted(key for (key,) in db.execute(query, (len(prefix), prefix.lower())))
        return pick_key(keys, prefix, self.path)

    def _read_runs(
        self, db: sqlite3.Connection, keys: Sequence[str], convert: Callable[[StoredRun], T]
    ) -> Iterator[tuple[str, T]]:
        """Read many runs at once, in no particular order; keys that are not done are left out."""
        for first in range(0, len(keys), _RUNS_PER_QUERY):
            some = keys[first : first + _RUNS_PER_QUERY]
            columns = ", ".join((*Header._fields, *_COPIES))
            query = f"SELECT {columns} FROM runs WHERE key IN ({_placeholders(some)})"
            size = len(Header._fields)
            headers = {Header(*row[:size]): row[size:] for row in db.execute(query, some)}
            query = (
                f"SELECT {', '.join(BATCH_COLUMNS)}, run FROM batches WHERE run IN ({_placeholders(some)}) "
                "ORDER BY run, number"
            )
            batches = {key: list(group) for key, group in groupby(db.execute(query, some), itemgetter(-1))}
            for header, copies in headers.items():
                try:
                    run = StoredRun(header, batches.pop(header.key, []))
                    if _list_copies(run.spec, run.facts) != copies:
                        raise ValueError("its columns contradict its spec")
                    yield header.key, convert(run)
                except (ValueError, TypeError, KeyError) as error:
                    raise StoreError(
                        f"run {header.key} in the store {self.path} is not what was stored ({error}): the file was "
                        f'damaged or edited. To have it done again: sqlite3 "{self.path}" "PRAGMA foreign_keys=ON; '
                        f"DELETE FROM runs WHERE key='{header.key}'\", then start the benchmark again"
                    ) from error

    # Recipes and figures

    def save_recipe(self, name: str, text: str, members: Sequence[Member]) -> None:
        """Store a recipe (its TOML) and the runs that it asks for, in place of an earlier recipe of that name.

        Raises:
            ValueError: The name is not a plain name, or a member belongs to another recipe.
        """
        check_name(name)
        if others := sorted({member.recipe for member in members} - {name}):
            raise ValueError(f"members of {', '.join(others)} cannot be stored under {name}")
        rows = [
            (name, position, member.spec.key, member.label, member.role, to_json(member.spec.document()),
             to_json(dict(member.varies)), to_json(dict(member.condition)))
            for position, member in enumerate(members)
        ]  # fmt: skip
        with self._database.writing() as db:
            db.execute("DELETE FROM recipes WHERE name = ?", (name,))
            db.execute("INSERT INTO recipes VALUES (?, ?, ?)", _add_digest((name, text)))
            db.executemany("INSERT INTO members VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", map(_add_digest, rows))

    def recipes(self) -> dict[str, str]:
        """Return the names of the stored recipes and their TOML."""
        with self._database.reading() as db:
            rows = db.execute("SELECT * FROM recipes ORDER BY name").fetchall()
        return dict(self._check_digests(rows, "recipes"))

    def members(self, recipe: str) -> list[Member]:
        """Return the runs that a recipe asks for, in its order.

        Raises:
            ValueError: There is no such recipe.
        """
        check_recipe(recipe, self.recipes(), self.path)
        query = "SELECT * FROM members WHERE recipe = ? ORDER BY position"
        with self._database.reading() as db:
            rows = list(self._check_digests(db.execute(query, (recipe,)), "recipes"))
        if [row[1] for row in rows] != list(range(len(rows))):
            raise self._describe_change("recipes")
        return [
            Member(recipe, label, role, spec_from_json(spec), json.loads(varies), json.loads(condition))
            for _, _, _, label, role, spec, varies, condition in rows
        ]

    def put_figure(self, name: str, recipe: str, description: Mapping[str, Any], payload: bytes) -> None:
        """Store the data of a figure, in place of an earlier one of the same name and recipe."""
        row = (recipe, name, to_json(dict(description)), payload)
        with self._database.writing() as db:
            db.execute("REPLACE INTO figures VALUES (?, ?, ?, ?, ?)", _add_digest(row))

    def figures(self, recipe: str) -> list[Figure]:
        """Return the figures of a recipe, by name."""
        with self._database.reading() as db:
            # All figures are checked, so that one whose recipe has another name by damage is not left out in silence.
            rows = list(self._check_digests(db.execute("SELECT * FROM figures ORDER BY name"), "figures"))
        return [
            Figure(name, recipe, json.loads(text), payload)
            for owner, name, text, payload in rows
            if owner == recipe
        ]

    def _check_digests(self, rows: Iterable[tuple[Any, ...]], table: str) -> Iterator[tuple[Any, ...]]:
        """Yield rows without their digests; refuse one that is not what was stored."""
        for row in rows:
            if _add_digest(row[:-1]) != row:
                raise self._describe_change(table)
            yield row[:-1]

    def _describe_change(self, table: str) -> StoreError:
        return StoreError(
            f"the {table} in the store {self.path} are not what was stored: the file was damaged or edited. To write "
            f'them again: sqlite3 "{self.path}" "PRAGMA foreign_keys=ON; DELETE FROM {table}", then start the '
            "benchmark again"
        )

    # Claims: two processes must not do the same run, and a dead one must not block anybody.

    def claim(self, keys: Iterable[str], owner: Owner) -> set[str]:
        """Claim runs for a process that is about to do them.

        Returns:
            The runs that the owner now holds. Runs that are done are not among them, nor runs of another owner who is
            alive and has renewed its claim within ``LEASE`` seconds.
        """
        with self._database.writing() as db:
            done = {key for (key,) in db.execute("SELECT key FROM runs")}
            ours = set(keys) - done - (_find_claimed(db) - _find_claims_of(db, owner))
            rows = [(key, *astuple(owner), time.time()) for key in ours]
            db.executemany("REPLACE INTO claims VALUES (?, ?, ?, ?, ?)", rows)
        return ours

    def renew(self, owner: Owner) -> None:
        """Renew all claims of an owner. It must do so every few seconds."""
        query = "UPDATE claims SET renewed = ? WHERE host = ? AND pid = ? AND started = ?"
        with self._database.writing() as db:
            db.execute(query, (time.time(), *astuple(owner)))

    def release(self, owner: Owner, keys: Iterable[str] | None = None) -> None:
        """Release claims of an owner: some, or all of them."""
        with self._database.writing() as db:
            ours = _find_claims_of(db, owner)
            released = ours if keys is None else ours & set(keys)
            db.executemany("DELETE FROM claims WHERE key = ?", [(key,) for key in released])

    def claimed(self) -> set[str]:
        """Return the keys of the runs that a living owner holds."""
        with self._database.reading() as db:
            return _find_claimed(db)


def _find_claimed(db: sqlite3.Connection) -> set[str]:
    now, is_alive = time.time(), cache(Owner.is_alive)

    def is_held(host: str, pid: int, started: float, renewed: float) -> bool:
        try:
            # The size of the difference: a clock that was set back must not hold claims for ever.
            return abs(now - renewed) <= LEASE and is_alive(Owner(host, pid, started))
        except TypeError:
            return False  # a damaged claim; at worst a run is done twice, and stored once

    rows = db.execute("SELECT key, host, pid, started, renewed FROM claims").fetchall()
    return {key for key, *claim in rows if is_held(*claim)}


def _find_claims_of(db: sqlite3.Connection, owner: Owner) -> set[str]:
    query = "SELECT key FROM claims WHERE host = ? AND pid = ? AND started = ?"
    return {key for (key,) in db.execute(query, astuple(owner))}


def _list_copies(spec: Spec, facts: Facts) -> tuple[Any, ...]:
    """Return the columns of ``runs`` that repeat entries of spec and facts, so that they can be filtered by."""
    return (
        *(spec.method, spec.checkpoint, spec.data, spec.domain_label, spec.stream),
        *(spec.batch_size, spec.selection, spec.seed, facts.device, facts.seconds),
    )


def _add_digest(row: Sequence[Any]) -> tuple[Any, ...]:
    return (*row, hashlib.sha256(repr(tuple(row)).encode()).hexdigest())


def _placeholders(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keep Python from searching millions of new numbers for garbage again and again: that is half the time."""
    active = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if active:
            gc.enable()


def pick_key(keys: Sequence[str], prefix: str, path: Path) -> str:
    """Return the only one of the keys that begin with a prefix.

    Raises:
        ValueError: There is none, or there are several.
    """
    if not keys:
        raise ValueError(f"no run in {path} has a key that begins with {prefix!r}; `ttvd runs` lists them")
    if len(keys) > 1:
        some = ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")
        raise ValueError(f"{len(keys)} runs have keys that begin with {prefix!r}: {some}; give more digits")
    return keys[0]


def check_recipe(recipe: str, known: Iterable[str], path: Path) -> None:
    """Refuse the name of a recipe that is not there.

    Raises:
        ValueError: There is no such recipe. The message has the nearest name, or all names.
    """
    names = list(known)
    if recipe not in names:
        near = difflib.get_close_matches(recipe, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names) or 'none'}"
        raise ValueError(f"no recipe {recipe!r} in {path}; {hint}")


def check_name(name: str) -> None:
    """Refuse the name of a recipe that could lead out of a folder: files are called like it.

    Raises:
        ValueError: The name is not a plain name.

    Example:
        >>> check_name("table1-cifar10")
    """
    if {PurePosixPath(name).name, PureWindowsPath(name).name} != {name} or not name.strip(". "):
        raise ValueError(f"a recipe is called like a file, without folders; {name!r} is no such name")
