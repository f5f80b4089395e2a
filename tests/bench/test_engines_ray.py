"""A Ray cluster of this machine; it is started once, by the one test that needs it."""

import fcntl
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.engines import SMALL, do_here, do_slowly, plan_small, strip
from ttvd import __version__
from ttvd.bench.engines import Advanced, Event, Failed, Finished, Message, Started
from ttvd.bench.engines.ray import RayEngine, RayPool
from ttvd.bench.grid import make_plans
from ttvd.bench.recipe import cut_seeds, parse_recipe
from ttvd.bench.spec import WorkerConfig
from ttvd.bench.store import Store

ROOT = Path(__file__).parents[2]


def find_deaths(events: list[Event]) -> list[Event]:
    """Notes of workers that died; on a busy machine others say that there is no room yet."""
    return [
        event for event in events if isinstance(event, Message) and "worker process has died" in event.text
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("one_cluster")
def test_the_rows_are_those_of_any_engine_and_a_killed_worker_costs_nothing_but_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")  # where workers find the run of this test
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a file into the home folder
    handler = signal.getsignal(signal.SIGTERM)
    _, members, shared = plan_small()
    specs = [member.spec for member in members]
    fails = replace(specs[0], method="nonsense")
    events: list[Event] = []
    for event in RayEngine(jobs=1, do_run=do_slowly).run([fails, *specs], WorkerConfig(), shared):
        if isinstance(event, Advanced) and event.key == specs[1].key and not find_deaths(events):
            worker = next(e.worker for e in reversed(events) if isinstance(e, Started))
            os.kill(int(worker.split()[-1]), signal.SIGKILL)
        events.append(event)
    done = {event.key: event.run for event in events if isinstance(event, Finished)}
    alone = do_here(specs)
    assert {key: strip(run) for key, run in done.items()} == {key: strip(run) for key, run in alone.items()}
    assert all(run.facts.threads == 1 for run in done.values())
    [failed] = [event for event in events if isinstance(event, Failed)]
    assert failed.key == fails.key
    assert "no method is called 'nonsense'" in failed.text
    assert len(find_deaths(events)) == 1
    assert [event.key for event in events if isinstance(event, Started)] == [
        fails.key, specs[0].key, specs[1].key, specs[1].key,
    ]  # fmt: skip
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) == handler


def test_starts_that_fail_now_and_then_do_not_end_a_long_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def get(handle: str) -> tuple[str, str]:
        if handle.startswith("bad"):
            raise ray.exceptions.RayError("no room")
        return handle, __version__

    monkeypatch.setattr(ray, "get", get)
    engine = RayPool(None, None, 1.0, 1, do_slowly)
    handles = ["bad 1", "bad 2", "good 1", "bad 3", "bad 4", "good 2"]
    engine._starting = dict.fromkeys([*handles, "bad 5", "bad 6", "bad 7"])
    messages = [event for handle in handles for event in engine._welcome(handle)]
    assert (len(messages), [actor.name for actor in engine._free]) == (4, ["good 1", "good 2"])
    with pytest.raises(OSError, match="end before they begin"):
        [event for handle in ("bad 5", "bad 6", "bad 7") for event in engine._welcome(handle)]


def test_a_head_that_is_gone_ends_the_grid_with_a_word() -> None:
    engine, killed = RayEngine("127.0.0.1:1", jobs=1), list[int]()
    engine._process = SimpleNamespace(kill=lambda: killed.append(1))
    engine._watched, engine._answered = {"its head": ("127.0.0.1", 1)}, {"its head": time.monotonic()}
    engine._check_cluster()  # it may come back
    engine._answered["its head"] -= 60
    engine._check_cluster()  # it was asked a moment ago
    engine._ask_at = 0.0
    with pytest.raises(ConnectionError, match="its head does not answer"):
        engine._check_cluster()
    assert killed


def test_the_end_of_a_cluster_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    seen: list[object] = []
    monkeypatch.setattr(ray, "shutdown", lambda: seen.append("shutdown"))
    pool = RayPool(None, 1, 1.0, 1, do_slowly, connected=seen.append)
    pool.close()
    assert seen == []
    pool._connected = True
    pool.close()
    assert seen == [{}, "shutdown"]


@pytest.mark.parametrize("gpus", [0.0, -1.0, 1.5, float("nan")])
def test_shares_of_a_gpu_that_ray_cannot_give_are_refused(gpus: float) -> None:
    with pytest.raises(ValueError, match="share of a GPU"):
        RayEngine(gpus=gpus)


def test_a_remote_client_is_refused() -> None:
    with pytest.raises(ValueError, match="node of the cluster"):
        RayEngine("ray://head:10001")


def test_an_engine_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one job"):
        RayEngine(jobs=0)


@pytest.mark.parametrize(
    ("address", "message"),
    [("127.0.0.1:1", "ray start --head"), ("head", "HOST:PORT"), ("127.0.0.1:65536", "HOST:PORT")],
)
def test_a_cluster_that_is_not_there_is_noticed_at_once(address: str, message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        next(RayEngine(address).run([], WorkerConfig()))


@pytest.fixture
def one_cluster() -> Iterator[None]:
    """Let one cluster run at a time: two that start together on a machine can remove each other's sockets."""
    with (Path(tempfile.gettempdir()) / "ttvd-tests-ray.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_processes(parent: int) -> dict[str, int]:
    """The processes below a process by their command lines."""
    found: dict[str, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found[(entry / "cmdline").read_text(errors="replace")] = int(entry.name)
                found |= find_processes(int(entry.name))
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("one_cluster")
def test_a_lost_cluster_ends_the_command_with_a_word_and_the_same_command_goes_on(tmp_path: Path) -> None:
    recipe, path = tmp_path / "small.toml", tmp_path / "runs.db"
    recipe.write_text(SMALL.replace("128}", "128}\nstream = {batch_size = 2}"))
    arguments = ["bench", recipe, "--store", path, "--engine", "ray", "--jobs", 1, "--seeds", "0,1"]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT / "src")}

    def start() -> tuple[subprocess.Popen[str], list[str]]:
        """Start the command and wait until its first run is done."""
        process = subprocess.Popen(
            [sys.executable, "-m", "ttvd", *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )  # fmt: skip
        assert process.stdout is not None
        return process, list(itertools.takewhile(lambda line: not line.startswith("["), process.stdout))

    process, seen = start()
    victims = [
        pid
        for words, pid in find_processes(process.pid).items()
        if words.startswith("ray::RayWorker") or "raylet/raylet" in words.split("--")[0]
    ]
    assert len(victims) == 2, seen
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 2, (seen, text)
    assert "Ray cluster is lost" in text
    assert "it does what is missing" in text
    assert "Traceback" not in text
    process, seen = start()
    assert "1 are in the store already" in seen[0] or "2 are" in seen[0]
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, (seen, text)
    plans, _ = make_plans([cut_seeds(parse_recipe(recipe.read_text(), "small"), (0, 1))], WorkerConfig())
    alone = do_here([member.spec for _, members in plans for member in members])
    with Store(path, readonly=True) as store:
        done = store.load(store.done())
        assert store.failures() == []
    assert {key: strip(run) for key, run in done.items()} == {key: strip(run) for key, run in alone.items()}
