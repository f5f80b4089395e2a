"""Processes of this machine: what they give, and what happens when they die, fail or are interrupted."""

import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from tests.bench.engine_fakes import (
    do_here,
    make_run,
    make_spec,
    plan_small,
    prepare_fake,
    prepare_slow,
    strip,
)
from ttvd.bench.engines import Advanced, Broken, Event, Finished, LocalEngine, Noted, Started, local
from ttvd.bench.spec import WorkerConfig
from ttvd.data.sets import ImageSet

E = TypeVar("E")


def find(events: list[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    """Those of the processes that are still there after so long."""
    end = time.monotonic() + seconds
    while pids and time.monotonic() < end:
        time.sleep(0.02)
        pids = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    return pids


def my_workers() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


def test_a_killed_worker_costs_nothing_but_time() -> None:
    _, members, shared = plan_small()
    specs = [member.spec for member in members]
    events: list[Event] = []
    engine = LocalEngine(1, prepare=prepare_slow)
    engine.start()
    for event in engine.run(specs, WorkerConfig(), shared):
        if isinstance(event, Advanced) and event.key == specs[1].key and not find(events, Noted):
            for pid in my_workers():
                os.kill(pid, signal.SIGKILL)
        events.append(event)
    done = {event.key: event.run for event in find(events, Finished)}
    alone = do_here(specs)
    assert {key: strip(run) for key, run in done.items()} == {key: strip(run) for key, run in alone.items()}
    assert all(run.spec == alone[key].spec for key, run in done.items())
    assert all(run.facts.order == alone[key].facts.order for key, run in done.items())
    assert [(event.key, event.worker) for event in find(events, Started)] == [
        (specs[0].key, "0"), (specs[1].key, "0"), (specs[1].key, "0"),
    ]  # fmt: skip
    [note] = find(events, Noted)
    assert "killed (SIGKILL)" in note.text
    assert "memory" in note.text
    assert my_workers() == []


def test_failures_stay_with_their_run(tmp_path: Path) -> None:
    """One run raises, one runs out of memory, one kills its process again and again; one is sent Ctrl-C."""
    pixels = torch.arange(64, dtype=torch.uint8).reshape(1, 1, 8, 8)
    shared = {"digits": ImageSet(pixels, torch.tensor([0]))}
    calm = make_spec(0, nap=0.3, pid=str(tmp_path / "pid"))
    views = make_spec(1, act="shared", sum=int(pixels.sum()))
    raises, eats, dies = (make_spec(2, act=act) for act in ("raise", "eat", "die"))
    events: list[Event] = []
    for event in LocalEngine(1, prepare=prepare_fake).run(
        [calm, raises, views, eats, dies], WorkerConfig(), shared
    ):
        if isinstance(event, Advanced) and event.key == calm.key:
            os.kill(
                int((tmp_path / "pid").read_text()), signal.SIGINT
            )  # a terminal sends it to all processes
        events.append(event)
    assert {event.key: event.run for event in find(events, Finished)} == {
        spec.key: make_run(spec) for spec in (calm, views)
    }
    texts = {event.key: event.text for event in find(events, Broken)}
    assert texts.keys() == {raises.key, eats.key, dies.key}
    assert 'raise RuntimeError("broken on purpose")' in texts[raises.key]
    assert texts[eats.key].startswith("Traceback")
    assert texts[eats.key].rstrip().endswith("MemoryError")
    assert "killed (SIGKILL)" in texts[dies.key]
    assert "tried 2 times" in texts[dies.key]
    assert pixels.is_shared()


def test_workers_are_gone_when_the_engine_is_left_in_the_middle() -> None:
    engine = LocalEngine(1, prepare=prepare_fake)
    events = engine.run([make_spec(0, nap=30.0)], WorkerConfig())
    while not isinstance(next(events), Advanced):
        pass
    pids = my_workers()
    assert len(pids) == 1
    events.close()
    assert wait_until_gone(pids, 0.5) == []


def test_workers_that_are_never_used_are_gone_too() -> None:
    engine = LocalEngine(2)
    engine.start()
    pids = my_workers()
    assert len(pids) == 2
    engine.close()
    assert wait_until_gone(pids, 0.5) == []


def test_little_shared_memory_is_noticed_before_it_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    images = ImageSet(torch.zeros(1, 1, 16, 16, dtype=torch.uint8), torch.tensor([0]))
    moved, note = local.share_sets({"digits": images})
    assert moved == {}
    assert note is not None
    assert "Each worker loads the data by itself" in note.text
    assert not images.images.is_shared()


@pytest.mark.parametrize(("jobs", "devices"), [(0, ["cpu"]), (1, [])])
def test_an_engine_without_workers_is_refused(jobs: int, devices: list[str]) -> None:
    with pytest.raises(ValueError, match="at least one job"):
        LocalEngine(jobs, devices)
