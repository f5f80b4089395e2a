"""Many processes on one store, some of them killed; run as a script, this file is one of them."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.store import make_long_run, temporary_folder
from ttvd.bench import database
from ttvd.bench.spec import Run, Spec
from ttvd.bench.store import LEASE, Owner, Store

WRITERS = 4


def make_run(seed: int) -> Run:
    return make_long_run(seed, batches=40)


def make_spec(seed: int) -> Spec:
    return make_long_run(seed, batches=1).spec


KEYS = [make_spec(seed).key for seed in range(40)]


# What the processes do.


def fork(work: Callable[[], object]) -> int:
    """A process that does this; forked, since a new Python would need seconds to start."""
    if child := os.fork():
        return child
    try:
        work()
        os._exit(0)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)


def say(*words: object) -> None:
    """A line that no other process can write into."""
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def write_together(path: Path) -> None:
    """Four processes make the store and add runs that overlap, at the same time."""

    def add_some(first: int) -> None:
        with Store(path) as store:
            added = [seed for seed in range(first, first + 20) if store.add(make_run(seed))]
        say(*added)

    children = [fork(lambda first=first: add_some(first)) for first in range(0, 10 * WRITERS, 10)]  # type: ignore[misc]
    for child in children:
        assert os.waitpid(child, 0)[1] == 0


def claim_together(path: Path) -> None:
    """Four processes claim the same runs and live until all have."""
    with Store(path):
        pass
    owners = []
    for _ in range(WRITERS):
        reader, writer = os.pipe()

        def claim(writer: int = writer) -> None:
            with Store(path) as store:
                ours = store.claim(KEYS, Owner.current())
            os.write(writer, " ".join(sorted(ours)).encode() or b" ")
            time.sleep(60)

        owners.append((fork(claim), reader))
    for _, reader in owners:
        say(os.read(reader, 10000).decode())
    for child, _ in owners:
        os.kill(child, signal.SIGKILL)


def kill_writers(path: Path) -> None:
    """A writer is killed at a random moment, again and again; after each, the store has whole runs only."""
    moments, expected = random.Random(0), dict[str, Run]()

    def add_all(first: int) -> None:
        with Store(path) as store:
            for seed in range(first, 10**6):
                store.add(make_run(seed))

    for number in range(20):
        if number == 10:  # the second half with the rollback journal, which network file systems get
            database._is_on_network = lambda path: True
        count = len(expected)
        child = fork(lambda first=count: add_all(first))  # type: ignore[misc]
        time.sleep(moments.uniform(0.01, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with Store(path) as store:
            runs = store.load(store.done())
        expected |= {run.spec.key: run for run in map(make_run, range(count, len(runs)))}
        assert runs == expected
    say(len(expected))


ROLES = {"write": write_together, "claim": claim_together, "kill": kill_writers}


# What is tested.


@pytest.fixture
def path() -> Iterator[Path]:
    with temporary_folder() as folder:
        yield folder / "runs.db"


Played = tuple[Path, dict[str, list[str]]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The folder of the stores of all roles, and what each role said. One new Python plays all, as it starts slowly."""
    root, folder = Path(__file__).parents[2], tmp_path_factory.mktemp("stores")
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env={**os.environ, "PYTHONPATH": f"{root}:{root / 'src'}"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line in ROLES:
            words = said[line] = []
        else:
            words += line.split()
    return folder, said


def test_writers_at_the_same_time_lose_and_double_nothing(played: Played) -> None:
    folder, said = played
    added = [int(seed) for seed in said["write"]]
    assert sorted(added) == list(range(10 * WRITERS + 10))
    with Store(folder / "write.db", readonly=True) as store:
        assert store.load(store.done()) == {run.spec.key: run for run in map(make_run, added)}


def test_killed_writers_leave_whole_runs(played: Played) -> None:
    folder, said = played
    (count,) = said["kill"]
    assert int(count) > 20
    with Store(folder / "kill.db", readonly=True) as store:
        assert len(store.done()) == int(count)


def test_a_run_is_claimed_by_one_process(played: Played) -> None:
    folder, said = played
    assert sorted(said["claim"]) == sorted(KEYS)
    with Store(folder / "claim.db") as store:  # all who claimed are dead now
        assert store.claimed() == set()
        assert store.claim(KEYS, Owner.current()) == set(KEYS)


def test_claims_of_a_killed_process_are_free_at_once(path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    me = Owner.current()
    other = Owner(me.host, process.pid, int(stat[19]) / os.sysconf("SC_CLK_TCK"))
    with Store(path) as store, process:
        assert store.claim(KEYS[:2], other) == set(KEYS[:2])
        assert store.claim(KEYS[:3], me) == {KEYS[2]}
        assert store.claimed() == set(KEYS[:3])
        process.kill()
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        assert store.claimed() == {KEYS[2]}  # also as long as nobody has waited for its end
        process.wait()
        assert store.claim(KEYS[:3], me) == set(KEYS[:3])


def test_a_later_process_of_the_same_number_is_not_the_owner(path: Path) -> None:
    me = Owner.current()
    with Store(path) as store:
        store.claim(KEYS[:1], Owner(me.host, me.pid, me.started - 1))
        assert store.claimed() == set()
        assert store.claim(KEYS[:1], me) == set(KEYS[:1])


def test_claims_on_other_machines_last_as_long_as_they_are_renewed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1e9
    monkeypatch.setattr(time, "time", lambda: now)
    me, other = Owner.current(), Owner("far away", 1, 0.0)
    with Store(path) as store:
        store.claim(KEYS[:2], other)
        for _ in range(3):
            now += 0.9 * LEASE
            assert store.claim(KEYS[:2], me) == set()
            store.renew(other)
        now += 1.1 * LEASE
        assert store.claim(KEYS[:2], me) == set(KEYS[:2])
        store.renew(other)  # too late: they are ours
        assert store.claim(KEYS[:2], other) == set()


def test_claims_end_with_the_run_or_when_they_are_released(path: Path) -> None:
    me, other = Owner.current(), Owner("far away", 1, 0.0)
    with Store(path) as store:
        assert store.claim(KEYS[:4], other) == set(KEYS[:4])
        store.add(make_run(0))
        store.fail(make_spec(1), "it failed")
        assert store.claimed() == set(KEYS[1:4])
        store.release(me)
        store.release(other, KEYS[:2])
        assert store.claimed() == set(KEYS[2:4])
        assert store.claim(KEYS[:4], me) == {KEYS[1]}  # the first is done
        store.release(other)
        assert store.claimed() == {KEYS[1]}


if __name__ == "__main__":
    for role, play in ROLES.items():
        say(role)
        play(Path(sys.argv[1], f"{role}.db"))
