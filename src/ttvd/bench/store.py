"""The one file that a benchmark leaves, from which every table and figure is made."""

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ttvd.bench.spec import Member, Run, Spec
from ttvd.bench.store import claims
from ttvd.bench.store.claims import Owner
from ttvd.bench.store.codec import Block, encode, spec_from_json, to_json
from ttvd.bench.store.database import Database
from ttvd.bench.store.reader import check_name, check_recipe, pick_key
from ttvd.bench.store.reading import read_runs, without_collection
from ttvd.bench.store.values import Failure, Figure, Summary


class Store:
    """Finished runs with all their rows, in one SQLite file that many processes may use at once.

    Everything is written in transactions, one for each finished run: after a kill, or on a full disk, a run is there
    with all its rows or not at all. Writers use a write-ahead log; on network file systems, and wherever else that is
    not possible, the rollback journal, which is as safe. Nothing in the file can run code. Threads may share a store.

    Args:
        path: The file; its folder must exist.
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
        self._base = Database(self.path, create=create, readonly=readonly)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the store cannot be used afterwards."""
        self._base.close()

    def add(self, run: Run) -> bool:
        """Store a finished run, and forget its failure and its claim.

        Returns:
            False when it is there already; then nothing changes.

        Raises:
            ValueError: The record could not be read back, e.g. because it has no rows.
        """
        line, batches = encode(run)
        spec, facts = run.spec, run.facts
        columns = (
            *(
                line.key,
                line.spec,
                line.facts,
                line.bins,
                line.digest,
                time.time(),
                spec.method,
                spec.checkpoint,
            ),
            *(spec.data, spec.domain_label, spec.stream, spec.batch_size, spec.selection, spec.seed),
            *(facts.device, facts.seconds),
        )
        with self._base.writing() as db:
            query = f"INSERT INTO runs VALUES ({_places(columns)}) ON CONFLICT (key) DO NOTHING"
            if db.execute(query, columns).rowcount == 0:
                return False
            lines = [(line.key, *batch) for batch in batches]
            db.executemany(f"INSERT INTO batches VALUES ({_places(lines[0])})", lines)
            for table in ("failures", "claims"):
                db.execute(f"DELETE FROM {table} WHERE key = ?", (line.key,))
        return True

    def fail(self, spec: Spec, text: str) -> None:
        """Keep how a run failed, until it succeeds; nothing if it has. The claim stays with its owner."""
        key = spec.key
        text = text.encode(
            errors="backslashreplace"
        ).decode()  # names of files need not be UTF-8, texts here must
        with self._base.writing() as db:
            if db.execute("SELECT 1 FROM runs WHERE key = ?", (key,)).fetchone() is None:
                line = (key, to_json(spec.document()), text, time.time())
                db.execute("REPLACE INTO failures VALUES (?, ?, ?, ?)", line)

    def done(self) -> set[str]:
        """Keys of the finished runs."""
        with self._base.reading() as db:
            return {key for (key,) in db.execute("SELECT key FROM runs")}

    def load(self, keys: Iterable[str]) -> dict[str, Run]:
        """Runs with all their rows, equal to those that were added; keys that are not done are left out."""
        wanted = list(dict.fromkeys(keys))
        with self._base.reading() as db, without_collection():
            found = dict(read_runs(db, self.path, wanted, Block.run))
        return {key: found[key] for key in wanted if key in found}

    def summaries(self) -> list[Summary]:
        """All finished runs without their rows, in the order in which they were added."""
        with self._base.reading() as db:
            keys = [key for (key,) in db.execute("SELECT key FROM runs ORDER BY added, key")]
            found = dict(read_runs(db, self.path, keys, _summarize))
        return [found[key] for key in keys]

    def failures(self) -> list[Failure]:
        """Runs that failed and have not succeeded since, the first failure first."""
        with self._base.reading() as db:
            lines = db.execute("SELECT key, spec, text, failed FROM failures ORDER BY failed, key").fetchall()
        return [Failure(key, spec_from_json(spec), text, when) for key, spec, text, when in lines]

    def find(self, prefix: str) -> str:
        """The key that begins so, of all runs that are done, failed or asked for by a recipe.

        Raises:
            ValueError: No key begins so, or several do.
        """
        query = " UNION ".join(
            f"SELECT key FROM {table} WHERE substr(key, 1, ?1) = ?2"
            for table in ("runs", "failures", "members")
        )
        with self._base.reading() as db:
            keys: list[str] = sorted(key for (key,) in db.execute(query, (len(prefix), prefix.lower())))
        return pick_key(keys, prefix, self.path)

    def enroll(self, name: str, text: str, members: Sequence[Member]) -> None:
        """Keep a recipe (its TOML) and the runs that it asks for, in place of what the recipe of that name asked.

        Raises:
            ValueError: The name is no plain name, or a member is of another recipe.
        """
        check_name(name)
        if others := sorted({member.recipe for member in members} - {name}):
            raise ValueError(f"members of {', '.join(others)} cannot be enrolled under {name}")
        lines = [(name, position, *_member_columns(member)) for position, member in enumerate(members)]
        with self._base.writing() as db:
            db.execute("DELETE FROM recipes WHERE name = ?", (name,))
            db.execute("INSERT INTO recipes VALUES (?, ?)", (name, text))
            db.executemany("INSERT INTO members VALUES (?, ?, ?, ?, ?, ?, ?, ?)", lines)

    def recipes(self) -> dict[str, str]:
        """Names of the recipes that are enrolled, and their TOML."""
        with self._base.reading() as db:
            return dict(db.execute("SELECT name, text FROM recipes ORDER BY name"))

    def members(self, recipe: str) -> list[Member]:
        """What a recipe asks for, in the order in which it was enrolled.

        Raises:
            ValueError: There is no such recipe.
        """
        check_recipe(recipe, self.recipes(), self.path)
        query = "SELECT label, role, spec, varies, condition FROM members WHERE recipe = ? ORDER BY position"
        with self._base.reading() as db:
            lines = db.execute(query, (recipe,)).fetchall()
        return [
            Member(recipe, label, role, spec_from_json(spec), json.loads(varies), json.loads(condition))
            for label, role, spec, varies, condition in lines
        ]

    def claim(self, keys: Iterable[str], owner: Owner) -> set[str]:
        """Take runs to do them.

        Returns:
            Those that are now the owner's (or were): not those that are done, nor those that another owner holds who
            is alive and has renewed within ``LEASE`` seconds.
        """
        with self._base.writing() as db:
            return claims.claim(db, keys, owner, time.time())

    def renew(self, owner: Owner) -> None:
        """Say that the owner is still at work; to be called every few seconds."""
        with self._base.writing() as db:
            claims.renew(db, owner, time.time())

    def release(self, owner: Owner, keys: Iterable[str] | None = None) -> None:
        """Give up claims: these, or all of the owner."""
        with self._base.writing() as db:
            claims.release(db, owner, keys)

    def claimed(self) -> set[str]:
        """Keys of the runs that a living owner is doing now."""
        with self._base.reading() as db:
            return claims.held_keys(db, time.time())

    def put_figure(self, name: str, recipe: str, description: Mapping[str, Any], payload: bytes) -> None:
        """Keep what a figure is drawn from, in place of one of the same name and recipe."""
        line = (recipe, name, to_json(dict(description)), payload)
        with self._base.writing() as db:
            db.execute("REPLACE INTO figures VALUES (?, ?, ?, ?)", line)

    def figures(self, recipe: str) -> list[Figure]:
        """Figures of a recipe, by name."""
        query = "SELECT name, recipe, description, payload FROM figures WHERE recipe = ? ORDER BY name"
        with self._base.reading() as db:
            lines = db.execute(query, (recipe,)).fetchall()
        return [Figure(name, owner, json.loads(text), payload) for name, owner, text, payload in lines]


def _summarize(block: Block) -> Summary:
    return Summary(block.line.key, block.spec, block.metrics(), block.facts, len(block.numbers), block.kept())


def _member_columns(member: Member) -> tuple[str, ...]:
    texts = (to_json(member.spec.document()), to_json(dict(member.varies)), to_json(dict(member.condition)))
    return member.spec.key, member.label, member.role, *texts


def _places(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))
