"""Runs on a Ray cluster, which may be this machine alone.

Results go to the driver, and only the driver writes to the store. Why actors and not tasks: actors keep models and data
between runs and stay on one GPU, while Ray ends the process of a GPU task after each run. Why not Ray's own retries of
actors: they neither tell a lost node from a run that kills its worker, nor say that a run begins again.
"""

import os
import platform
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from ttvd import __version__
from ttvd.bench.engines import Engine, Event, Failed, Finished, Message, Shared, WorkerLost
from ttvd.bench.engines.worker import DoRun, Worker
from ttvd.bench.job import execute as do_run
from ttvd.bench.spec import Spec, WorkerConfig
from ttvd.data.sets import ImageSet

_COUNT_EVERY = 5.0  # seconds between two looks at the size of the cluster, which may grow
_SAY_AFTER = 60.0  # seconds without a single worker
_HEAD_TIMEOUT = 20.0  # seconds without an answer of the head; after 60 s Ray ends this process without a word
_FAILED_STARTS = 3


class RayEngine(Engine):
    """Actors of a Ray cluster, each with one run at a time.

    An actor gets a run only when it has started, so that a run never waits for resources that no node has.

    Args:
        address: Address of a cluster that this machine belongs to, ``"auto"`` or ``"HOST:6379"``. Without it, a cluster
            is started on this machine, and stopped in the end.
        jobs: Number of actors; as many as the cluster has room for unless given.
        gpus: Share of a GPU for each actor, when the device of the configuration is a GPU.
        retries: How often a run is tried again after its process has died; a lost node does not count.
        do_run: Does a run in an actor.
    """

    def __init__(
        self,
        address: str | None = None,
        jobs: int | None = None,
        gpus: float = 1.0,
        retries: int = 1,
        *,
        do_run: DoRun = do_run,
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
        self._address, self._jobs, self._gpus, self.retries, self._do_run = (
            address,
            jobs,
            gpus,
            retries,
            do_run,
        )
        self._connected = False
        self._resources: dict[str, float] = {}  # what Ray reserves for each actor
        self._create_actor: Callable[[], Any]
        self._starting: dict[Any, Any] = {}  # reference to the actor's name -> actor
        self._free: list[_Actor] = []
        self._busy: dict[Any, tuple[_Actor, Spec]] = {}  # stream of events -> actor that makes it, its run
        self._limit, self._count_at, self._failed_starts = 0, 0.0, 0
        self._say_at = time.monotonic() + _SAY_AFTER
        self._head, self._head_answered = ("", 0), 0.0

    def _prepare(self, config: WorkerConfig, shared: Shared) -> Iterator[Event]:
        self._connected = connect(self._address, self._jobs and self._jobs * config.threads)
        import ray

        on_gpu = torch.device(config.device).type == "cuda"
        self._resources = {"CPU": float(config.threads), "GPU": self._gpus if on_gpu else 0.0}
        actor_class = ray.remote(
            num_cpus=self._resources["CPU"], num_gpus=self._resources["GPU"], max_restarts=0
        )(RayWorker)
        sets = {
            name: ray.put((images.images.numpy(), images.labels.numpy(), images.classes, images.name))
            for name, images in shared.items()
        }
        # Ray shows an actor only the GPUs that are its own.
        config = replace(config, device="cuda" if on_gpu else config.device)
        self._create_actor = lambda: actor_class.remote(self._do_run, config, sets)
        self._say_at = time.monotonic() + _SAY_AFTER
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self._head, self._head_answered = (host, int(port)), time.monotonic()
        yield from ()

    def _has_free_worker(self) -> bool:
        """Return whether an actor is free. Also ask for as many actors as there is room for."""
        if time.monotonic() >= self._count_at:
            self._count_at = time.monotonic() + _COUNT_EVERY
            if self._check_head():
                self._limit = self._count_room() if self._jobs is None else self._jobs
        while len(self._starting) + len(self._free) + len(self._busy) < self._limit:
            actor = self._create_actor()
            self._starting[actor.introduce.remote()] = actor
        return bool(self._free)

    def _check_head(self) -> bool:
        """Return whether the head of the cluster answers.

        Raises:
            ConnectionError: It has not answered for a while.
        """
        try:
            socket.create_connection(self._head, timeout=2).close()
        except OSError as error:
            if time.monotonic() - self._head_answered < _HEAD_TIMEOUT:
                return False
            # Nothing can be ended through a head that is gone; trying would take Ray a minute.
            self._starting, self._free, self._busy, self._connected = {}, [], {}, False
            raise ConnectionError(
                f"the head of the Ray cluster at {self._head[0]}:{self._head[1]} does not answer any more ({error}). "
                "All runs that were finished are stored; start the cluster again, then this command, which goes on"
            ) from error
        self._head_answered = time.monotonic()
        return True

    def _count_room(self) -> int:
        import ray

        there = ray.cluster_resources()
        # One actor is always asked for: a cluster may grow when somebody waits.
        return max(
            1, min(int(there.get(kind, 0) / count) for kind, count in self._resources.items() if count)
        )

    def _is_busy(self) -> bool:
        return bool(self._busy)

    def _submit(self, spec: Spec) -> None:
        actor = self._free.pop()
        self._busy[actor.handle.run.remote(spec.key, spec)] = actor, spec

    def _collect(self, seconds: float) -> Iterator[Event | WorkerLost]:
        import ray

        waiting = [*self._starting, *self._busy]
        ready, _ = ray.wait(waiting, num_returns=1, timeout=seconds) if waiting else ([], [])
        if not waiting:
            time.sleep(seconds)
        for handle in ready:
            yield from self._welcome(handle) if handle in self._starting else self._receive(handle)
        if not (self._free or self._busy) and time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + _SAY_AFTER
            needs = " and ".join(f"{count:g} {kind}" for kind, count in self._resources.items() if count)
            yield Message(f"No node has room yet for a worker with {needs}.")

    def _welcome(self, handle: Any) -> Iterator[Event]:
        """Take an actor that has started, or has failed to."""
        import ray

        actor = self._starting.pop(handle)
        try:
            name, version = ray.get(handle)
        except ray.exceptions.RayError as error:
            self._failed_starts += 1
            if self._failed_starts == _FAILED_STARTS:
                raise OSError(f"Ray workers end before they begin: {error}") from error
            yield Message(f"A Ray worker could not start: {_shorten(error)}.")
            return
        if version != __version__:
            raise OSError(
                f"{name} has ttvd {version}, this process {__version__}; install the same everywhere"
            )
        self._free.append(_Actor(name, actor))
        self._failed_starts = 0

    def _receive(self, stream: Any) -> Iterator[Event | WorkerLost]:
        """Take the next event of a run, or the death of its actor."""
        import ray

        actor, spec = self._busy[stream]
        try:
            event = ray.get(next(stream))
        except (ray.exceptions.RayError, StopIteration) as error:
            del self._busy[stream]
            _kill(actor.handle)
            reason = f"{actor.name} is lost: {_shorten(error)}."
            yield WorkerLost(spec, reason, str(error), _is_node_lost(error))
            return
        if isinstance(event, Finished | Failed):
            del self._busy[stream]
            if isinstance(event, Failed) and event.replace_worker:
                _kill(actor.handle)
            else:
                self._free.append(actor)
        yield event

    def close(self) -> None:
        """End the actors, and the connection to Ray if it was made here."""
        actors = [*self._free, *(actor for actor, _ in self._busy.values())]
        for handle in [*self._starting.values(), *(actor.handle for actor in actors)]:
            _kill(handle)
        self._starting, self._free, self._busy = {}, [], {}
        if self._connected:
            import ray

            ray.shutdown()
            self._connected = False


class _Actor(NamedTuple):
    name: str
    handle: Any


def _kill(handle: Any) -> None:
    import ray

    with suppress(ray.exceptions.RayError):
        ray.kill(handle)


def _shorten(error: BaseException) -> str:
    """Return what Ray says about an actor in one sentence; the rest is about Ray."""
    if _is_node_lost(error):
        return "its node does not answer"
    text = str(error) or type(error).__name__
    reason = text.partition("The actor is dead because ")[2] or text
    return reason.strip().splitlines()[0].partition(". ")[0].rstrip(".")


def _is_node_lost(error: BaseException) -> bool:
    """Return whether a whole node is gone, or the network to it."""
    import ray

    return isinstance(error, ray.exceptions.ActorUnavailableError) or "node has died" in str(error)


class RayWorker:
    """Does runs in an actor.

    Args:
        do_run: Does a run.
        config: Configuration of the worker.
        sets: Ray's references to the arrays of test sets, by name.
    """

    def __init__(self, do_run: DoRun, config: WorkerConfig, sets: Mapping[str, Any]) -> None:
        import ray

        shared = {name: _wrap(*ray.get(parts)) for name, parts in sets.items()}
        self._worker = Worker(f"{platform.node()} {os.getpid()}", do_run, config, shared)

    def introduce(self) -> tuple[str, str]:
        """Return the name of the worker and the version of ttvd; this answers when the actor has started."""
        return self._worker.name, __version__

    def run(self, key: str, spec: Spec) -> Iterator[Event]:
        """Do a run; yield what happens."""
        events: SimpleQueue[Event] = SimpleQueue()
        threading.Thread(target=self._worker.run, args=(key, spec, events.put), daemon=True).start()
        while True:
            event = events.get()
            yield event
            if isinstance(event, Finished | Failed):
                return


def _wrap(images: Any, labels: Any, classes: tuple[str, ...] | None, name: str) -> ImageSet:
    """Return a set whose tensors lie in Ray's shared memory."""
    with warnings.catch_warnings():
        # The arrays are read-only, because they belong to all actors of the node. Nobody writes to a test set.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return ImageSet(torch.from_numpy(images), torch.from_numpy(labels), classes, name)


def connect(address: str | None, cores: int | None = None) -> bool:
    """Connect to a Ray cluster, unless this process is connected to one.

    Args:
        address: ``"auto"`` or ``"HOST:PORT"``; without it, a cluster is started on this machine.
        cores: Cores of the cluster that is started; all of the machine unless given.

    Returns:
        Whether a connection was made, which the caller must end.

    Raises:
        ConnectionError: No cluster answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody asked for a report to Ray's makers
    # Ray prints pages about lost workers and nodes into the progress; the events say it in a sentence.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    import ray

    if ray.is_initialized():
        return False
    where: dict[str, Any] = {"address": address}
    if address is None:
        # "local": never a cluster that happens to run here.
        where = {"address": "local", "include_dashboard": False, "num_cpus": cores}
    else:
        _check_address(address)
    with _keep_signal_handlers():
        try:
            ray.init(**where, log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            raise ConnectionError(f"no Ray cluster answers at {address}: {error}") from error
    return True


def _check_address(address: str) -> None:
    """Refuse an address where nobody is; Ray itself would try to reach it for minutes."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(
            f"the address of a Ray cluster is auto or HOST:PORT, as in 10.0.0.1:6379; got {address!r}"
        )
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address} ({error}); `ray start --head` prints the address of a new one"
        ) from error


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Restore the caller's signal handlers, which Ray replaces by its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
