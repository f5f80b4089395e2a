"""What engines share: the loop that gives runs to workers, with workers that exist on paper only; and the worker."""

from collections.abc import Iterable, Iterator

import pytest

from tests.helpers.engines import do_fake, make_run, make_spec
from ttvd.bench.engines import Event, Failed, Finished, Idle, Message, Shared, Started, WorkerLost, WorkerPool
from ttvd.bench.engines.worker import Worker
from ttvd.bench.spec import Spec, WorkerConfig

SPECS = [make_spec(seed) for seed in range(4)]


class PaperEngine(WorkerPool):
    """Two workers; the first run loses its worker so many times before it succeeds."""

    def __init__(self, losses: int = 0, *, node_lost: bool = False) -> None:
        self.losses, self.node_lost = losses, node_lost
        self.submitted: list[Spec] = []
        self.running: list[Spec] = []
        self.most = 0

    def _prepare(self, config: WorkerConfig, shared: Shared) -> Iterator[Event]:
        yield from ()

    def _has_free_worker(self) -> bool:
        return len(self.running) < 2

    def _is_busy(self) -> bool:
        return bool(self.running)

    def _submit(self, spec: Spec) -> None:
        self.running.append(spec)
        self.submitted.append(spec)
        self.most = max(self.most, len(self.running))

    def _collect(self, seconds: float) -> Iterator[Event | WorkerLost]:
        if self.running:
            spec = self.running.pop(0)
            if spec == SPECS[0] and self.losses:
                self.losses -= 1
                yield WorkerLost(spec, "It fell.", "From high above.", self.node_lost)
            else:
                yield Finished(spec.key, make_run(spec))

    def close(self) -> None:
        pass

    def run_all(self, specs: Iterable[Spec | None] = SPECS) -> list[Event]:
        return list(self.run(specs, WorkerConfig()))


def find_done(events: list[Event]) -> set[str]:
    return {event.key for event in events if isinstance(event, Finished)}


ALL = {spec.key for spec in SPECS}


def test_all_runs_are_done_two_at_a_time() -> None:
    engine = PaperEngine()
    assert find_done(engine.run_all()) == ALL
    assert engine.submitted == SPECS
    assert engine.most == 2
    assert engine.run_all([]) == []


def test_a_run_that_lost_its_worker_is_tried_once_more() -> None:
    engine = PaperEngine(losses=1)
    events = engine.run_all()
    assert find_done(events) == ALL
    [message] = [event.text for event in events if isinstance(event, Message)]
    assert message == "It fell. Its run (tent, fog 5) is tried again."
    assert engine.submitted.count(SPECS[0]) == 2


def test_a_run_that_loses_two_workers_fails_and_the_others_go_on() -> None:
    events = PaperEngine(losses=5).run_all()
    [failed] = [event for event in events if isinstance(event, Failed)]
    assert failed.key == SPECS[0].key
    assert all(word in failed.text for word in ("It fell.", "tried 2 times", "From high above."))
    assert find_done(events) == ALL - {SPECS[0].key}


@pytest.mark.parametrize(("losses", "succeeds"), [(5, True), (6, False)])
def test_the_loss_of_nodes_is_forgiven_longer(losses: int, succeeds: bool) -> None:
    events = PaperEngine(losses, node_lost=True).run_all()
    assert (find_done(events) == ALL) is succeeds


def test_runs_are_asked_for_only_when_a_worker_is_free() -> None:
    asked: list[Spec] = []

    def offer() -> Iterator[Spec]:
        for spec in SPECS:
            asked.append(spec)
            yield spec

    next(PaperEngine().run(offer(), WorkerConfig()))
    assert asked == SPECS[:2]


def test_there_may_be_no_run_for_a_while() -> None:
    events = PaperEngine().run_all([SPECS[0], None, None, SPECS[1]])
    assert find_done(events) == {SPECS[0].key, SPECS[1].key}
    assert Idle() in events


def test_a_worker_whose_version_gives_another_key_refuses() -> None:
    events: list[Event] = []
    Worker("7", do_fake, WorkerConfig(), {}).run("0" * 16, SPECS[0], events.append)
    assert events[0] == Started("0" * 16, "7")
    assert isinstance(events[1], Failed)
    assert "another version of ttvd" in events[1].text


def test_a_worker_without_resources_says_so_for_each_run() -> None:
    events: list[Event] = []
    worker = Worker("7", do_fake, WorkerConfig(device="toaster"), {})
    for spec in SPECS[:2]:
        worker.run(spec.key, spec, events.append)
    failed = [event for event in events if isinstance(event, Failed)]
    assert [event.key for event in failed] == [spec.key for spec in SPECS[:2]]
    assert all("toaster" in event.text for event in failed)
