"""Runs on their way through workers, and what becomes of those whose worker is lost."""

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ttvd.bench.engines.events import Broken, Event, Noted, Waited
from ttvd.bench.spec import Spec

TICK = 0.25  # seconds without news after which the driver looks around


@dataclass(frozen=True)
class Lost:
    """The worker of a run is gone.

    Attributes:
        key: Of the run.
        why: What became of the worker, as a sentence.
        detail: What else the engine says about it.
        blameless: The run cannot have caused it: a machine has left.
    """

    key: str
    why: str
    detail: str = ""
    blameless: bool = False


class WorkerPool(Protocol):
    """Workers, as the loop of an engine sees them."""

    def has_room(self) -> bool:
        """Whether a worker is free, or can be started at once."""

    def give(self, spec: Spec) -> None:
        """RayWorker a run to a free worker."""

    def is_busy(self) -> bool:
        """Whether a run is with a worker."""

    def collect(self, seconds: float) -> Iterator[Event | Lost]:
        """What has happened; waits so long when nothing has."""


class Tasks:
    """Runs that wait for a worker: those that lost theirs, then what is offered.

    Args:
        specs: Asked for the next run only when a worker is free. None says: nothing now, ask again later.
        retries: How often a run is tried again after its worker was lost.
        patience: How often it is tried again after a loss that it cannot have caused.
    """

    def __init__(self, specs: Iterable[Spec | None], retries: int = 1, patience: int = 5) -> None:
        self._offers: Iterator[Spec | None] | None = iter(specs)
        self._retries, self._patience = retries, patience
        self._out: dict[str, Spec] = {}
        self._again: deque[Spec] = deque()
        self._losses: Counter[tuple[str, bool]] = Counter()
        self._ask_at = 0.0

    @property
    def ended(self) -> bool:
        """Whether no run will come any more, unless one that is out is lost."""
        return self._offers is None and not self._again

    def take(self) -> Spec | None:
        """The next run, None when there is none now."""
        spec = self._again.popleft() if self._again else self._ask()
        if spec is not None:
            self._out[spec.key] = spec
        return spec

    def _ask(self) -> Spec | None:
        if self._offers is None or time.monotonic() < self._ask_at:
            return None
        try:
            spec = next(self._offers)
        except StopIteration:
            self._offers = None
            return None
        if spec is None:
            self._ask_at = time.monotonic() + TICK
        return spec

    def requeue(self, loss: Lost) -> Noted | Broken:
        """Queue a run again whose worker is lost, or give it up."""
        spec, kind = self._out.pop(loss.key), (loss.key, loss.blameless)
        self._losses[kind] += 1
        if self._losses[kind] > (self._patience if loss.blameless else self._retries):
            times = sum(count for (key, _), count in self._losses.items() if key == loss.key)
            text = f"{loss.why}\nIt was tried {times} times, each time in a new worker.\n{loss.detail}"
            return Broken(loss.key, text.strip())
        self._again.append(spec)
        return Noted(f"{loss.why} Its run ({spec.method}, {spec.domain_label}) is tried again.")


def drive(pool: WorkerPool, tasks: Tasks) -> Iterator[Event]:
    """Keep a pool busy until all runs are done or given up."""
    while True:
        while pool.has_room() and (spec := tasks.take()) is not None:
            pool.give(spec)
        if tasks.ended and not pool.is_busy():
            return
        quiet = True
        for news in pool.collect(TICK):
            quiet = False
            yield tasks.requeue(news) if isinstance(news, Lost) else news
        if quiet:
            yield Waited()
