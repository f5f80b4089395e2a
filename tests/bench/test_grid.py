"""The driver and the store: what is done, skipped, left to others, and kept when something goes wrong."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.helpers.engines import PlainEngine, do_here, make_run, make_spec, plan_small, strip
from ttvd.bench.engines import EndedElsewhere, Event, Finished, Message, Started
from ttvd.bench.engines.local import LocalEngine
from ttvd.bench.grid import Interrupted, Outcome, run_grid, run_plans
from ttvd.bench.job import execute as do_run
from ttvd.bench.recipe import parse_recipe
from ttvd.bench.spec import Member, Spec, WorkerConfig
from ttvd.bench.store import Owner, Store

RECIPE = parse_recipe('data.set = "digits"\nmethods = [{name = "tent"}]', "fakes")


class Diary:
    """Remembers what it is shown, and may act on it."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.skipped = -1
        self.events: list[Event] = []

    def begin(self, missing: Sequence[Spec], skipped: int) -> None:
        self.missing, self.skipped = [spec.key for spec in missing], skipped

    def see(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "runs.db") as opened:
        yield opened


def run_fakes(store: Store, specs: Sequence[Spec], watch: Diary | None = None) -> Outcome:
    members = [Member("fakes", "tent", "test", spec) for spec in specs]
    return run_plans([(RECIPE, members)], store, PlainEngine(), WorkerConfig(), watch=watch)


SPECS = [make_spec(seed) for seed in range(4)]


def test_all_runs_and_the_recipe_are_stored(store: Store) -> None:
    diary = Diary()
    assert run_fakes(store, SPECS, diary) == Outcome(4, 0, {}, 0)
    assert store.load(store.done()) == {spec.key: make_run(spec) for spec in SPECS}
    assert store.recipes() == {"fakes": RECIPE.text}
    assert [member.spec for member in store.members("fakes")] == SPECS
    assert diary.missing == [spec.key for spec in SPECS]
    assert [event.key for event in diary.events if isinstance(event, Started)] == diary.missing
    assert store.claimed() == set()


def test_only_what_is_missing_is_done(store: Store) -> None:
    run_fakes(store, SPECS[:3])
    diary = Diary()
    assert run_fakes(store, SPECS, diary) == Outcome(1, 3, {}, 0)
    assert diary.missing == [SPECS[3].key]
    assert diary.skipped == 3
    assert run_fakes(store, SPECS) == Outcome(0, 4, {}, 0)


def test_a_run_that_two_recipes_ask_for_is_done_once(store: Store) -> None:
    other = parse_recipe(RECIPE.text, "others")
    plans = [
        (recipe, [Member(recipe.name, "tent", "test", spec) for spec in SPECS]) for recipe in (RECIPE, other)
    ]
    assert run_plans(plans, store, PlainEngine(), WorkerConfig()).done == 4
    assert store.members("others")[0].spec == SPECS[0]


def test_a_failure_is_kept_with_its_traceback_and_tried_again_next_time(store: Store) -> None:
    bad = make_spec(7, act="raise")
    outcome = run_fakes(store, [bad, *SPECS])
    assert (outcome.done, list(outcome.failed)) == (4, [bad.key])
    [failure] = store.failures()
    assert failure.key == bad.key
    assert failure.text == outcome.failed[bad.key]
    assert "broken on purpose" in failure.text
    assert store.claimed() == set()
    again = run_fakes(store, [bad, *SPECS])
    assert (again.skipped, list(again.failed)) == (4, [bad.key])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_what_is_finished(store: Store, number: signal.Signals) -> None:
    class Impatient(Diary):
        def see(self, event: Event) -> None:
            super().see(event)
            if isinstance(event, Started) and event.key == SPECS[1].key:
                os.kill(os.getpid(), number)

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as caught:
        run_fakes(store, SPECS, Impatient())
    assert isinstance(caught.value, KeyboardInterrupt)
    assert caught.value.outcome.done == len(store.done()) == 1
    assert store.claimed() == set()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert run_fakes(store, SPECS) == Outcome(3, 1, {}, 0)


def test_a_full_disk_stops_it_and_loses_nothing(store: Store) -> None:
    class Filler(Diary):
        def see(self, event: Event) -> None:
            if isinstance(event, Finished):  # no file may grow any more
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))

    run_fakes(store, SPECS[:1])
    limits, size = resource.getrlimit(resource.RLIMIT_FSIZE), store.path.stat().st_size
    try:
        with pytest.raises(OSError, match=r"disk|space"):
            run_fakes(store, [make_spec(seed) for seed in range(200)], Filler())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    done = store.load(store.done())
    assert make_spec(1).key in done
    assert all(run == make_run(run.spec) for run in done.values())
    assert run_fakes(store, SPECS).failed == {}


@pytest.fixture
def neighbour() -> Iterator[tuple[Owner, subprocess.Popen[bytes]]]:
    """Another living process."""
    process = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"],
                               stdout=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    me = Owner.current()
    try:
        yield Owner(me.host, process.pid, int(fields[19]) / os.sysconf("SC_CLK_TCK")), process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


Neighbour = tuple[Owner, "subprocess.Popen[bytes]"]


def test_runs_of_a_living_process_are_waited_for(store: Store, neighbour: Neighbour) -> None:
    owner, _ = neighbour
    assert owner.is_alive()
    assert store.claim([SPECS[0].key, SPECS[1].key], owner) == {SPECS[0].key, SPECS[1].key}

    def settle() -> None:
        time.sleep(0.4)
        store.add(make_run(SPECS[0]))
        store.fail(SPECS[1], "it failed over there")
        store.release(owner)

    helper, diary = threading.Thread(target=settle), Diary()
    helper.start()
    outcome = run_fakes(store, SPECS, diary)
    helper.join()
    assert outcome == Outcome(2, 0, {SPECS[1].key: "it failed over there"}, 1)
    assert {event.key for event in diary.events if isinstance(event, EndedElsewhere)} == {
        SPECS[0].key,
        SPECS[1].key,
    }
    [note] = [event.text for event in diary.events if isinstance(event, Message)]
    assert "another process" in note
    assert "2 of the runs" in note


def test_runs_of_a_process_that_dies_are_taken_over(store: Store, neighbour: Neighbour) -> None:
    owner, process = neighbour
    store.claim([SPECS[0].key], owner)
    killer = threading.Timer(0.4, process.kill)
    killer.start()
    assert run_fakes(store, SPECS) == Outcome(4, 0, {}, 0)
    killer.join()


def test_a_real_recipe(store: Store) -> None:
    recipe, members, _ = plan_small()
    assert run_grid(recipe, store, PlainEngine(do_run), WorkerConfig()) == Outcome(2, 0, {}, 0)
    alone = do_here([member.spec for member in members])
    stored = store.load(store.done())
    assert {key: strip(run) for key, run in stored.items()} == {key: strip(run) for key, run in alone.items()}


def test_a_recipe_that_cannot_be_run_changes_nothing(store: Store) -> None:
    text = 'data.set = "digits"\ncheckpoints.plain = "nowhere"\nmethods = [{name = "bn"}]'
    with pytest.raises((ValueError, OSError), match="nowhere"):
        run_grid(parse_recipe(text, "bad"), store, LocalEngine(), WorkerConfig())
    assert store.recipes() == {}
