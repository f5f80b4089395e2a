"""Engines do runs in other processes: on this machine, or on a Ray cluster. Here is what they share."""

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ttvd.bench.spec import Run, Spec, WorkerConfig
from ttvd.data.sets import ImageSet

TICK = 0.25
"""Seconds without news after which an engine yields :class:`Idle`."""
NODE_RETRIES = 5
"""How often a run is tried again after it lost its worker together with a whole machine."""

Shared = Mapping[str, ImageSet]
"""Test sets that are in memory already, by the names that `Resources` gives them."""


@dataclass(frozen=True)
class Started:
    """A worker has begun a run."""

    key: str
    worker: str


@dataclass(frozen=True)
class Advanced:
    """A worker has done some batches of a run."""

    key: str
    done: int
    total: int


@dataclass(frozen=True)
class Finished:
    """A run is done."""

    key: str
    run: Run


@dataclass(frozen=True)
class Failed:
    """A run has failed.

    Attributes:
        key: Key of the run.
        text: The traceback, or what happened to the worker.
        replace_worker: Whether the process should not be used again, because nobody knows how much memory it still
            holds, or in what state its device is.
    """

    key: str
    text: str
    replace_worker: bool = False


@dataclass(frozen=True)
class Message:
    """Something that the user should know and that stops nothing."""

    text: str


@dataclass(frozen=True)
class Idle:
    """Nothing has happened for a moment."""


@dataclass(frozen=True)
class EndedElsewhere:
    """Another process has done a run, or has failed in it. The grid reports this, not an engine."""

    key: str


Event = Started | Advanced | Finished | Failed | Message | Idle | EndedElsewhere


@dataclass(frozen=True)
class WorkerLost:
    """A worker has died, and its run needs another one.

    Attributes:
        spec: The run.
        reason: What happened to the worker, as a sentence.
        detail: What else the engine knows.
        node_lost: Whether a whole machine is gone, which the run cannot have caused.
    """

    spec: Spec
    reason: str
    detail: str = ""
    node_lost: bool = False


class Engine(ABC):
    """Does runs in other processes, several at a time, one run per worker.

    A worker that dies loses its run only. The run is tried again in another worker.
    """

    def start(self) -> None:  # noqa: B027 (engines may have nothing to do)
        """Begin to start workers without waiting for them. This is not needed, but saves time before :meth:`run`."""

    @abstractmethod
    def run(
        self, specs: Iterable[Spec | None], config: WorkerConfig, shared: Shared | None = None
    ) -> Generator[Event, None, None]:
        """Do runs. All workers are gone when the generator ends or is closed.

        Args:
            specs: The runs. The next one is asked for when a worker is free. None means: nothing now, ask again later.
            config: Configuration of the workers.
            shared: Test sets that workers need not load.
        """

    @abstractmethod
    def close(self) -> None:
        """End all workers, whatever they do."""


class WorkerPool(Engine):
    """Gives runs to the workers of this process, each with one run at a time.

    A run fails when it has lost more than ``retries`` workers.
    """

    retries = 1

    def run(
        self, specs: Iterable[Spec | None], config: WorkerConfig, shared: Shared | None = None
    ) -> Generator[Event, None, None]:
        """Do runs, as the engine says."""
        queue = _Queue(specs, self.retries)
        try:
            yield from self._prepare(config, shared or {})
            while True:
                while self._has_free_worker() and (spec := queue.pop()) is not None:
                    self._submit(spec)
                if queue.is_empty() and not self._is_busy():
                    return
                idle = True
                for event in self._collect(TICK):
                    idle = False
                    yield queue.requeue(event) if isinstance(event, WorkerLost) else event
                if idle:
                    yield Idle()
        finally:
            self.close()

    @abstractmethod
    def _prepare(self, config: WorkerConfig, shared: Shared) -> Iterator[Event]:
        """Get ready for runs."""

    @abstractmethod
    def _has_free_worker(self) -> bool:
        """Return whether a worker is free, or can be started at once."""

    @abstractmethod
    def _submit(self, spec: Spec) -> None:
        """Give a run to a free worker."""

    @abstractmethod
    def _is_busy(self) -> bool:
        """Return whether a worker has a run."""

    @abstractmethod
    def _collect(self, seconds: float) -> Iterator[Event | WorkerLost]:
        """Yield what has happened; wait up to so many seconds when nothing has."""


class _Queue:
    """Runs that wait for a worker: first those that lost theirs, then new ones."""

    def __init__(self, specs: Iterable[Spec | None], retries: int) -> None:
        self._new: Iterator[Spec | None] | None = iter(specs)
        self._again: deque[Spec] = deque()
        self._retries = retries
        self._losses: Counter[tuple[str, bool]] = Counter()
        self._ask_at = 0.0

    def is_empty(self) -> bool:
        """Return whether no run will come any more, unless one that is being done is lost."""
        return self._new is None and not self._again

    def pop(self) -> Spec | None:
        """Return the next run, and None when there is none now."""
        if self._again:
            return self._again.popleft()
        if self._new is None or time.monotonic() < self._ask_at:
            return None
        try:
            spec = next(self._new)
        except StopIteration:
            self._new = None
            return None
        if spec is None:
            self._ask_at = time.monotonic() + TICK
        return spec

    def requeue(self, lost: WorkerLost) -> Message | Failed:
        """Queue a run again that lost its worker, or let it fail."""
        key = lost.spec.key
        self._losses[key, lost.node_lost] += 1
        if self._losses[key, lost.node_lost] > (NODE_RETRIES if lost.node_lost else self._retries):
            times = self._losses[key, True] + self._losses[key, False]
            text = f"{lost.reason}\nIt was tried {times} times, each time in a new worker.\n{lost.detail}"
            return Failed(key, text.strip())
        self._again.append(lost.spec)
        return Message(
            f"{lost.reason} Its run ({lost.spec.method}, {lost.spec.domain_label}) is tried again."
        )
