"""What can be wrong with the file of a store: every message says what to do, and nothing is lost or touched."""

import ctypes
import os
import resource
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.store import make_long_run as make_run
from ttvd.bench.spec import Member
from ttvd.bench.store import Store, StoreError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with ten runs."""
    made = tmp_path / "runs.db"
    with Store(made) as store:
        for seed in range(10):
            store.add(make_run(seed))
    return made


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """All connections that are opened from now on."""
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def watch(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        opened.append(connect(*args, **kwargs))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", watch)
    return opened


@contextmanager
def ordinary_rights() -> Iterator[None]:
    """Let file modes hold for root too: put down the two capabilities that pass over them, and take them up again."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    head, rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(head, rights) == 0
    before = rights[0]
    rights[0] = before & ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(head, rights) == 0
    try:
        yield
    finally:
        rights[0] = before
        assert libc.capset(head, rights) == 0


@contextmanager
def read_only(*paths: Path) -> Iterator[None]:
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        with ordinary_rights():
            yield
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


def assert_intact(path: Path, seeds: range = range(10)) -> None:
    runs = [make_run(seed) for seed in seeds]
    with Store(path, readonly=True) as store:
        assert store.load(store.done()) == {run.spec.key: run for run in runs}


def overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def edit(path: Path, *queries: str) -> None:
    db = sqlite3.connect(path)
    for query in queries:
        db.execute(query)
    db.commit()
    db.close()


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize(
    ("number", "advice"), [(99, "upgrade ttvd"), (1, "the version of ttvd that wrote it")]
)
def test_a_store_of_another_format_is_refused(path: Path, number: int, advice: str, readonly: bool) -> None:
    edit(path, f"PRAGMA user_version = {number}", "DROP TABLE figures")
    before = path.read_bytes()
    with pytest.raises(StoreError, match=rf"format {number}.*{advice}"):
        Store(path, readonly=readonly)
    assert path.read_bytes() == before


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("content", [b"key,error\n1,2\n", b"SQLite format 3\x00 or so", os.urandom(9000)])
def test_a_file_that_is_not_a_database_is_left_alone(tmp_path: Path, content: bytes, readonly: bool) -> None:
    (tmp_path / "notes.csv").write_bytes(content)
    with pytest.raises(StoreError, match=r"not a store: it is not an SQLite file.*another name"):
        Store(tmp_path / "notes.csv", readonly=readonly)
    assert (tmp_path / "notes.csv").read_bytes() == content


def test_a_pipe_is_not_a_store(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "runs.db")
    with pytest.raises(StoreError, match="no file"):
        Store(tmp_path / "runs.db")


def test_a_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    edit(tmp_path / "photos.db", "CREATE TABLE photos (name TEXT)")
    before = (tmp_path / "photos.db").read_bytes()
    with pytest.raises(StoreError, match="another program; give another name"):
        Store(tmp_path / "photos.db")
    assert (tmp_path / "photos.db").read_bytes() == before


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def scribble(path: Path) -> None:
    overwrite(path, 3 * 4096, os.urandom(4 * 4096))


def lose_a_table(path: Path) -> None:
    edit(path, "DROP TABLE batches")


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("damage", [truncate, scribble, lose_a_table])
def test_a_damaged_store_is_left_alone(path: Path, damage: Callable[[Path], None], readonly: bool) -> None:
    damage(path)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"is damaged .*left as it is.*\.recover.*begin a new store"):
        Store(path, readonly=readonly)
    assert path.read_bytes() == before


def test_the_log_of_a_killed_writer_is_not_moved_into_a_damaged_store(path: Path, tmp_path: Path) -> None:
    with Store(path) as store:
        store.add(make_run(10))
        for name in (path.name, f"{path.name}-wal"):  # as a kill at this moment would leave them
            shutil.copy(tmp_path / name, tmp_path / name.replace("runs", "killed"))
    killed = tmp_path / "killed.db"
    scribble(killed)
    before = killed.read_bytes(), (tmp_path / "killed.db-wal").read_bytes()
    with pytest.raises(StoreError, match="is damaged"):
        Store(killed)
    assert (killed.read_bytes(), (tmp_path / "killed.db-wal").read_bytes()) == before


def test_damage_that_sqlite_cannot_see_is_noticed(path: Path) -> None:
    content = path.read_bytes()
    overwrite(
        path, content.index(b"\x00\x00\x00\x00\x00\x00\x0c\x40"), b"\x01"
    )  # 3.5, of the run with seed 3
    keys = [make_run(seed).spec.key for seed in range(10)]
    with Store(path) as store:
        assert len(store.load(keys[:3] + keys[4:])) == 9
        with pytest.raises(StoreError, match=f"run {keys[3]} .*not what was stored.*DELETE FROM runs"):
            store.load(keys)
        with pytest.raises(StoreError, match=keys[3]):
            store.summaries()


def test_a_read_only_file_can_be_read(path: Path) -> None:
    with read_only(path):
        with pytest.raises(StoreError, match=r"cannot be written.*read-only"):
            Store(path)
        assert_intact(path)


def test_a_read_only_folder_can_be_read(path: Path, tmp_path: Path) -> None:
    with read_only(path, tmp_path):
        with pytest.raises(StoreError, match=r"read-only|folder writable"):
            Store(path)
        with pytest.raises(StoreError, match="folder writable"):
            Store(tmp_path / "new.db")
        assert_intact(path)


@pytest.mark.parametrize("journal", ["wal", "journal"])
def test_a_read_only_folder_with_the_log_of_a_killed_writer(path: Path, tmp_path: Path, journal: str) -> None:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute(f"PRAGMA journal_mode = {'wal' if journal == 'wal' else 'delete'}")
    db.execute("PRAGMA cache_size = 2")  # so that the disk has a part of it at once
    db.execute("BEGIN")
    db.execute("UPDATE batches SET kept = 0.25")
    (folder := tmp_path / "copy").mkdir()
    for name in (path.name, f"{path.name}-{journal}"):
        shutil.copy(tmp_path / name, folder / name)
    db.close()
    message = rf"copy it together with runs\.db-{journal}"
    with read_only(folder, *folder.iterdir()), pytest.raises(StoreError, match=message):
        Store(folder / path.name, readonly=True)
    assert_intact(folder / path.name)


def test_an_unreadable_file_says_so(path: Path) -> None:
    path.chmod(0)
    with ordinary_rights(), pytest.raises(OSError, match="cannot be opened"):
        Store(path)


def test_a_full_disk_loses_nothing(path: Path, connections: list[sqlite3.Connection]) -> None:
    with Store(path) as store:
        pages = connections[-1].execute("PRAGMA page_count").fetchone()[0]
        connections[-1].execute(f"PRAGMA max_page_count = {pages + 2}")
        for _ in range(2):
            with pytest.raises(StoreError, match=r"no space left.*was not written.*intact"):
                store.add(make_run(10, batches=500))
        assert len(store.done()) == 10
        connections[-1].execute("PRAGMA max_page_count = 100000")
        assert store.add(make_run(10))
    assert_intact(path, range(11))


def test_a_disk_that_refuses_loses_nothing(path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Store(path) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))
        try:
            with pytest.raises(StoreError, match=r"disk refused.*may be full"):
                store.add(make_run(10, batches=2000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert store.add(make_run(10))
    assert_intact(path, range(11))


def test_a_store_that_is_locked_for_long(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **more: connect(*args, **{**more, "timeout": 0.05}))
    other = connect(path, isolation_level=None)
    with Store(path) as store:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="another process has kept"):
            store.add(make_run(10))
        assert len(store.done()) == 10  # readers need not wait
        other.execute("ROLLBACK")
        assert store.add(make_run(10))
    other.close()


def test_without_shared_memory_the_rollback_journal_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect: Any = sqlite3.connect
    # A layer of SQLite that has no shared memory, as some network file systems.
    monkeypatch.setattr(sqlite3, "connect", lambda name, **more: connect(f"{name}&vfs=unix-dotfile", **more))
    with Store(tmp_path / "runs.db") as store:
        for seed in range(3):
            assert store.add(make_run(seed))
    assert_intact(tmp_path / "runs.db", range(3))
    assert [item.name for item in tmp_path.iterdir()] == ["runs.db"]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_store_that_vanishes_is_noticed(path: Path, tmp_path: Path, replaced: bool) -> None:
    with Store(path) as store:
        path.rename(tmp_path / "elsewhere.db")
        if replaced:
            path.write_bytes(b"")
        with pytest.raises(StoreError, match="deleted or replaced"):
            store.add(make_run(10))


def test_nothing_in_a_store_runs_code(path: Path, connections: list[sqlite3.Connection]) -> None:
    with Store(path):
        assert connections[-1].execute("PRAGMA trusted_schema").fetchone() == (0,)
        with pytest.raises(sqlite3.OperationalError, match=r"not authorized|no such function"):
            connections[-1].execute("SELECT load_extension('anything')")


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM runs WHERE seed = 3",  # its batches stay, without the cascade
        "DELETE FROM recipes",
        "UPDATE members SET recipe = 'other'",
    ],
)
def test_rows_whose_owner_is_gone_are_noticed_at_once(path: Path, query: str) -> None:
    with Store(path) as store:
        store.save_recipe("smoke", "seeds = [0]", [Member("smoke", "tent", "test", make_run(77).spec)])
    edit(path, query)
    with pytest.raises(StoreError, match=r"is damaged .*are gone.*\.recover"):
        Store(path, readonly=True)


@pytest.mark.parametrize("column", ["method", "domain", "seed", "seconds"])
def test_columns_to_filter_by_cannot_contradict_the_run(path: Path, column: str) -> None:
    edit(path, f"UPDATE runs SET {column} = 99 WHERE seed = 3")
    with Store(path) as store, pytest.raises(StoreError, match=r"columns contradict.*DELETE FROM runs"):
        store.summaries()


def test_a_missing_line_of_a_recipe_is_noticed(path: Path) -> None:
    members = [Member("smoke", "tent", "test", make_run(seed).spec) for seed in range(4)]
    with Store(path) as store:
        store.save_recipe("smoke", "seeds = [0]", members)
    edit(path, "DELETE FROM members WHERE position = 1")
    with Store(path) as store, pytest.raises(StoreError, match="not what was stored"):
        store.members("smoke")


def test_a_damaged_claim_holds_nothing(path: Path) -> None:
    edit(path, "INSERT INTO claims VALUES ('k', 'host', 'x', 'y', 'z'), ('l', 'host', 1, 1.0, x'00')")
    with Store(path) as store:
        assert store.claimed() == set()


def test_a_seed_that_a_store_cannot_hold_is_refused(path: Path) -> None:
    with Store(path) as store, pytest.raises(ValueError, match="seeds up to 9223372036854775807"):
        store.add(make_run(2**63))


@pytest.mark.parametrize("table", ["failures", "recipes", "members", "figures"])
def test_no_other_row_changes_without_notice(path: Path, table: str) -> None:
    spec = make_run(77).spec
    with Store(path) as store:
        store.fail(spec, "broken")
        store.save_recipe("smoke", "seeds = [0]", [Member("smoke", "tent", "test", spec)])
        store.put_figure("slice", "smoke", {"classes": [1]}, b"pixels")

    def read(store: Store) -> list[object]:
        return [store.failures(), store.recipes(), store.members("smoke"), store.figures("smoke")]

    column = {"failures": "text", "recipes": "text", "members": "varies", "figures": "payload"}[table]
    with Store(path, readonly=True) as store:
        assert len(read(store)) == 4
    edit(path, f"UPDATE {table} SET {column} = 'x'")
    with Store(path, readonly=True) as store, pytest.raises(StoreError, match=r"not what was stored.*DELETE"):
        read(store)
