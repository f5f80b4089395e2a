"""Processes of this machine: what they give, and what happens when they die, fail or are interrupted."""

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from tests.helpers.engines import do_fake, do_here, do_slowly, make_run, make_spec, plan_small, strip
from ttvd.bench.engines import Advanced, Event, Failed, Finished, Message, Started, local
from ttvd.bench.engines.local import LocalEngine
from ttvd.bench.resources import Resources
from ttvd.bench.spec import Run, Spec, WorkerConfig
from ttvd.data.sets import ImageSet

E = TypeVar("E")


def find(events: list[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """Return those of the processes that are still there after so long."""
    end = time.monotonic() + seconds
    while pids and time.monotonic() < end:
        time.sleep(0.02)
        pids = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    return pids


def find_workers() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


def do_either(spec: Spec, resources: Resources, progress: Callable[[int, int], None]) -> Run:
    """Do an invented run or a real one."""
    return (do_fake if spec.options else do_slowly)(spec, resources, progress)


def test_deaths_and_failures_stay_with_their_run(tmp_path: Path) -> None:
    """One run kills its process again and again, one is sent Ctrl-C, one raises, one loses its worker, one its memory.

    All in one grid, because processes start slowly.
    """
    _, members, shared = plan_small()
    real = [member.spec for member in members]
    calm = make_spec(0, nap=0.3, pid=str(tmp_path / "pid"))
    reads = make_spec(1, act="shared", sum=int(shared["digits"].images.sum()))
    dies, raises, eats = (make_spec(2, act=act) for act in ("die", "raise", "eat"))
    events: list[Event] = []
    engine = LocalEngine(1, do_run=do_either)
    engine.start()
    for event in engine.run([dies, calm, raises, reads, *real, eats], WorkerConfig(), shared):
        if isinstance(event, Advanced) and event.key == calm.key:
            os.kill(
                int((tmp_path / "pid").read_text()), signal.SIGINT
            )  # a terminal sends it to all processes
        if isinstance(event, Advanced) and event.key == real[1].key and len(find(events, Message)) == 1:
            for pid in find_workers():
                os.kill(pid, signal.SIGKILL)
        events.append(event)
    assert find_workers() == []

    done = {event.key: event.run for event in find(events, Finished)}
    assert done[calm.key] == make_run(calm)
    assert done[reads.key] == make_run(reads)
    alone = do_here(real)
    for key, run in alone.items():
        assert strip(done[key]) == strip(run)
        assert done[key].spec == run.spec
        assert done[key].facts.order == run.facts.order
    assert shared["digits"].images.is_shared()

    texts = {event.key: event.text for event in find(events, Failed)}
    assert texts.keys() == {raises.key, eats.key, dies.key}
    assert 'raise RuntimeError("broken on purpose")' in texts[raises.key]
    assert texts[eats.key].rstrip().endswith("MemoryError")
    assert "SIGKILL" in texts[dies.key]
    assert "tried 2 times" in texts[dies.key]
    started = [event.key for event in find(events, Started)]
    assert (started.count(dies.key), started.count(real[0].key), started.count(real[1].key)) == (2, 1, 2)
    assert {event.worker for event in find(events, Started)} == {"0"}
    assert all("SIGKILL" in event.text and "memory" in event.text for event in find(events, Message))
    assert len(find(events, Message)) == 2


def test_workers_are_gone_when_the_engine_is_left_in_the_middle() -> None:
    """Also the second one, which was never used."""
    engine = LocalEngine(2, do_run=do_fake)
    engine.start()
    events = engine.run([make_spec(0, nap=30.0)], WorkerConfig())
    while not isinstance(next(events), Advanced):
        pass
    pids = find_workers()
    assert len(pids) == 2
    events.close()
    assert wait_until_gone(pids, 0.5) == []


def test_workers_that_are_still_starting_are_gone_too() -> None:
    engine = LocalEngine(2)
    engine.start()
    pids = find_workers()
    assert len(pids) == 2
    engine.close()
    assert wait_until_gone(pids, 0.5) == []


def test_little_shared_memory_is_noticed_before_it_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    images = ImageSet(torch.zeros(1, 1, 16, 16, dtype=torch.uint8), torch.tensor([0]))
    moved, message = local.share_sets({"digits": images})
    assert moved == {}
    assert message is not None
    assert "MB free" in message.text
    assert not images.images.is_shared()


@pytest.mark.parametrize(("jobs", "devices"), [(0, ["cpu"]), (1, [])])
def test_an_engine_without_workers_is_refused(jobs: int, devices: list[str]) -> None:
    with pytest.raises(ValueError, match="at least one job"):
        LocalEngine(jobs, devices)
