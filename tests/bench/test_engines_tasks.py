"""What engines share: the loop, with workers that exist on paper only, and what a worker says."""

from collections.abc import Iterator

from tests.bench.engine_fakes import make_run, make_spec, prepare_fake
from ttvd.bench.engines import Broken, Event, Finished, Noted, Started, Waited
from ttvd.bench.engines.events import Job, Shared
from ttvd.bench.engines.tasks import Lost, Tasks, drive
from ttvd.bench.engines.worker import Worker
from ttvd.bench.spec import Spec, WorkerConfig


class PaperCrew:
    """Two workers; the losses of a run are played one after the other before it succeeds."""

    def __init__(self, losses: dict[str, list[Lost]]) -> None:
        self.losses, self.given, self.most = losses, list[Spec](), 0
        self.holding: list[Spec] = []

    def has_room(self) -> bool:
        return len(self.holding) < 2

    def is_busy(self) -> bool:
        return bool(self.holding)

    def give(self, spec: Spec) -> None:
        self.holding.append(spec)
        self.given.append(spec)
        self.most = max(self.most, len(self.holding))

    def collect(self, seconds: float) -> Iterator[Event | Lost]:
        if self.holding:
            spec = self.holding.pop(0)
            waiting = self.losses.get(spec.key)
            yield waiting.pop(0) if waiting else Finished(spec.key, make_run(spec))


SPECS = [make_spec(seed) for seed in range(4)]


def lose(spec: Spec, times: int, blameless: bool = False) -> dict[str, list[Lost]]:
    return {spec.key: [Lost(spec.key, "It fell.", "From high above.", blameless)] * times}


def finished(events: list[Event]) -> set[str]:
    return {event.key for event in events if isinstance(event, Finished)}


def test_all_runs_are_done_two_at_a_time() -> None:
    pool = PaperCrew({})
    assert finished(list(drive(pool, Tasks(SPECS)))) == {spec.key for spec in SPECS}
    assert pool.given == SPECS
    assert pool.most == 2


def test_a_lost_run_is_tried_once_more() -> None:
    pool = PaperCrew(lose(SPECS[1], 1))
    events = list(drive(pool, Tasks(SPECS)))
    assert finished(events) == {spec.key for spec in SPECS}
    assert [event.text for event in events if isinstance(event, Noted)] == [
        "It fell. Its run (tent, fog 5) is tried again."
    ]
    assert pool.given.count(SPECS[1]) == 2


def test_a_run_that_is_lost_twice_is_given_up_and_the_others_go_on() -> None:
    pool = PaperCrew(lose(SPECS[0], 5))
    events = list(drive(pool, Tasks(SPECS)))
    [broken] = [event for event in events if isinstance(event, Broken)]
    assert broken.key == SPECS[0].key
    assert broken.text == "It fell.\nIt was tried 2 times, each time in a new worker.\nFrom high above."
    assert finished(events) == {spec.key for spec in SPECS[1:]}


def test_losses_that_a_run_did_not_cause_are_forgiven_longer() -> None:
    events = list(drive(PaperCrew(lose(SPECS[0], 4, blameless=True)), Tasks(SPECS)))
    assert finished(events) == {spec.key for spec in SPECS}
    events = list(drive(PaperCrew(lose(SPECS[0], 9, blameless=True)), Tasks(SPECS, patience=2)))
    assert finished(events) == {spec.key for spec in SPECS[1:]}


def test_runs_are_asked_for_only_when_there_is_room() -> None:
    asked: list[Spec] = []

    def offer() -> Iterator[Spec]:
        for spec in SPECS:
            asked.append(spec)
            yield spec

    events = drive(PaperCrew({}), Tasks(offer()))
    next(events)
    assert asked == SPECS[:2]


def test_an_offer_may_have_nothing_for_a_while() -> None:
    pool = PaperCrew({})
    events = list(drive(pool, Tasks([SPECS[0], None, None, SPECS[1]])))
    assert finished(events) == {SPECS[0].key, SPECS[1].key}
    assert Waited() in events


def test_nothing_to_do_ends_at_once() -> None:
    assert list(drive(PaperCrew({}), Tasks([]))) == []


def test_a_worker_whose_version_gives_another_key_refuses() -> None:
    said: list[Event] = []
    Worker("7", prepare_fake, WorkerConfig(), {}).do("0" * 16, SPECS[0], said.append)
    assert said[0] == Started("0" * 16, "7")
    assert isinstance(said[1], Broken)
    assert "another version of ttvd" in said[1].text


def test_a_worker_that_cannot_be_prepared_says_so_for_each_run() -> None:
    def prepare(setting: WorkerConfig, shared: Shared) -> Job:
        raise OSError("the data are gone")

    said: list[Event] = []
    worker = Worker("7", prepare, WorkerConfig(), {})
    for spec in SPECS[:2]:
        worker.do(spec.key, spec, said.append)
    broken = [event for event in said if isinstance(event, Broken)]
    assert [event.key for event in broken] == [spec.key for spec in SPECS[:2]]
    assert all(event.text.rstrip().endswith("OSError: the data are gone") for event in broken)
