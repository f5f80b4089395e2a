"""Runs on a Ray cluster, which may be this machine alone. Results go to the driver, which alone writes."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ttvd import __version__
from ttvd.bench.engines.cluster import connect
from ttvd.bench.engines.events import Broken, Event, Finished, Noted, Prepare, Shared
from ttvd.bench.engines.ray_worker import RayWorker
from ttvd.bench.engines.tasks import Lost, Tasks, drive
from ttvd.bench.engines.worker import prepare_bench
from ttvd.bench.spec import Spec, WorkerConfig

_COUNT_EVERY = 5.0  # seconds between two looks at the size of the cluster, which may grow
_NOTE_AFTER = 60.0  # seconds without a single worker
_FALSE_STARTS = 3


class RayEngine:
    """Actors of a Ray cluster, each with one run at a time.

    Actors instead of tasks: they keep models and data between runs, and stay on one GPU, while Ray ends the process of
    a GPU task after each run. An actor gets work only when it is there, so that a run never waits for resources that
    no node has. When it dies, its run is tried again elsewhere.

    Args:
        address: Of a cluster that this machine belongs to, ``"auto"`` or ``"HOST:6379"``; one on this machine is
            started, and stopped in the end, unless given.
        jobs: Actors; as many as the cluster has room for unless given.
        gpus: Share of a GPU for each of them, when the setting's device is a GPU.
        retries: How often a run is tried again after its process has died; a lost node does not count.
        prepare: Makes the job of an actor.
    """

    def __init__(
        self,
        address: str | None = None,
        jobs: int | None = None,
        gpus: float = 1.0,
        retries: int = 1,
        *,
        prepare: Prepare = prepare_bench,
    ) -> None:
        if jobs is not None and jobs < 1:
            raise ValueError(f"there must be at least one job, got {jobs}")
        if address is not None and address.startswith("ray://"):
            raise ValueError(
                f"{address} is for remote clients, which cannot receive progress; start on a node of the cluster, "
                "with the address auto or HOST:6379"
            )
        if not gpus > 0 or (gpus > 1 and gpus != int(gpus)):
            raise ValueError(f"gpus is a share of a GPU, or a whole number of them, got {gpus}")
        self._address, self._jobs, self._gpus = address, jobs, gpus
        self._retries, self._prepare = retries, prepare
        self._ours = False
        self._crew: _RayCrew | None = None

    def start(self) -> None:
        """Do nothing: starting Ray cannot be done on the side."""

    def run(
        self, specs: Iterable[Spec | None], setting: WorkerConfig, shared: Shared | None = None
    ) -> Generator[Event, None, None]:
        """Do runs; see :class:`~ttvd.bench.engines.events.Engine`."""
        self._ours = connect(self._address, self._jobs and self._jobs * setting.threads)
        try:
            self._crew = _RayCrew(self._jobs, self._gpus, self._prepare, setting, shared or {})
            yield from drive(self._crew, Tasks(specs, self._retries))
        finally:
            self.close()

    def close(self) -> None:
        """End the actors, and Ray if it was started here."""
        if self._crew is not None:
            self._crew.close()
            self._crew = None
        if self._ours:
            import ray

            ray.shutdown()
            self._ours = False


class _Member(NamedTuple):
    name: str
    actor: Any


class _RayCrew:
    def __init__(
        self, jobs: int | None, gpus: float, prepare: Prepare, setting: WorkerConfig, shared: Shared
    ) -> None:
        import ray

        self._ray, self._jobs = ray, jobs
        on_gpu = torch.device(setting.device).type == "cuda"
        self._needs = {"CPU": float(setting.threads), "GPU": gpus if on_gpu else 0.0}
        hand = ray.remote(num_cpus=self._needs["CPU"], num_gpus=self._needs["GPU"], max_restarts=0)(RayWorker)
        sets = {
            name: ray.put((images.images.numpy(), images.labels.numpy(), images.classes, images.name))
            for name, images in shared.items()
        }
        # Ray shows an actor only the GPUs that are its own.
        setting = replace(setting, device="cuda" if on_gpu else setting.device)
        self._hire: Callable[[], Any] = lambda: hand.remote(prepare, setting, sets)
        self._coming: dict[Any, Any] = {}  # reference to its introduction -> actor
        self._idle: list[_Member] = []
        self._busy: dict[Any, tuple[_Member, Spec]] = {}  # stream of events -> who makes it, of which run
        self._limit, self._count_at, self._failed_starts = 0, 0.0, 0
        self._note_at = time.monotonic() + _NOTE_AFTER

    def has_room(self) -> bool:
        self._hire_more()
        return bool(self._idle)

    def _hire_more(self) -> None:
        """Ask for as many actors as there is room for, without waiting for them."""
        if time.monotonic() >= self._count_at:
            self._count_at = time.monotonic() + _COUNT_EVERY
            self._limit = self._count_room() if self._jobs is None else self._jobs
        while len(self._coming) + len(self._idle) + len(self._busy) < self._limit:
            actor = self._hire()
            self._coming[actor.introduce.remote()] = actor

    def _count_room(self) -> int:
        there = self._ray.cluster_resources()
        # One is always asked for: a cluster may grow when somebody waits.
        return max(1, min(int(there.get(kind, 0) / count) for kind, count in self._needs.items() if count))

    def is_busy(self) -> bool:
        return bool(self._busy)

    def give(self, spec: Spec) -> None:
        member = self._idle.pop()
        self._busy[member.actor.do.remote(spec.key, spec)] = member, spec

    def collect(self, seconds: float) -> Iterator[Event | Lost]:
        waiting = [*self._coming, *self._busy]
        ready, _ = self._ray.wait(waiting, num_returns=1, timeout=seconds) if waiting else ([], [])
        if not waiting:
            time.sleep(seconds)
        for handle in ready:
            yield from self._welcome(handle) if handle in self._coming else self._hear(handle)
        if not (self._idle or self._busy) and time.monotonic() >= self._note_at:
            self._note_at = time.monotonic() + _NOTE_AFTER
            yield Noted(f"No node has room yet for a worker with {self._describe_needs()}.")

    def _describe_needs(self) -> str:
        return " and ".join(f"{count:g} {kind}" for kind, count in self._needs.items() if count)

    def _welcome(self, handle: Any) -> Iterator[Event]:
        actor = self._coming.pop(handle)
        try:
            name, version = self._ray.get(handle)
            if version != __version__:
                raise OSError(
                    f"{name} has ttvd {version}, this process {__version__}; install the same everywhere"
                )
            self._idle.append(_Member(name, actor))
            self._failed_starts = 0
        except self._ray.exceptions.RayError as error:
            self._failed_starts += 1
            if self._failed_starts == _FALSE_STARTS:
                raise OSError(f"Ray workers end before they begin: {error}") from error
            yield Noted(f"A Ray worker could not start: {_shorten(error)}.")

    def _hear(self, stream: Any) -> Iterator[Event | Lost]:
        member, spec = self._busy[stream]
        try:
            event = self._ray.get(next(stream))
        except (self._ray.exceptions.RayError, StopIteration) as error:
            del self._busy[stream]
            self._end(member.actor)
            yield Lost(spec.key, f"{member.name} is lost: {_shorten(error)}.", str(error), _has_left(error))
            return
        if isinstance(event, Finished | Broken):
            del self._busy[stream]
            if isinstance(event, Broken) and event.spent:
                self._end(member.actor)
            else:
                self._idle.append(member)
        yield event

    def _end(self, actor: Any) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(actor)

    def close(self) -> None:
        members = [*self._idle, *(member for member, _ in self._busy.values())]
        for actor in [*self._coming.values(), *(member.actor for member in members)]:
            self._end(actor)


def _shorten(error: BaseException) -> str:
    """What Ray says about an actor in one sentence; the rest is about Ray."""
    if _has_left(error):
        return "its node does not answer"
    text = str(error) or type(error).__name__
    reason = text.partition("The actor is dead because ")[2] or text
    return reason.strip().splitlines()[0].partition(". ")[0].rstrip(".")


def _has_left(error: BaseException) -> bool:
    """Whether a whole node is gone, or the network to it."""
    import ray

    return isinstance(error, ray.exceptions.ActorUnavailableError) or "node has died" in str(error)
