"""Runs on a Ray cluster, which may be this machine alone.

Results go to the process of the command, and only that one writes to the store. Why actors and not tasks: actors keep
models and data between runs and stay on one GPU, while Ray ends the process of a GPU task after each run. Why not Ray's
own retries of actors: they neither tell a lost node from a run that kills its worker, nor say that a run begins again.

Ray ends a process that is connected to a cluster, without a word, when the cluster is lost. So `RayEngine` has a child
process for the connection (`serve`, `RayPool`) and says what has happened to it.
"""

import multiprocessing
import os
import platform
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from ttvd import __version__
from ttvd.bench.engines import (
    TICK,
    Engine,
    Event,
    Failed,
    Finished,
    Idle,
    Message,
    Shared,
    WorkerLost,
    WorkerPool,
)
from ttvd.bench.engines.local import describe_exit, share_sets
from ttvd.bench.engines.worker import DoRun, Worker
from ttvd.bench.job import execute as do_run
from ttvd.bench.spec import Spec, WorkerConfig
from ttvd.data.sets import ImageSet
from ttvd.interrupts import SIGNALS, delay_interrupts

_COUNT_EVERY = 5.0  # seconds between two looks at the size of the cluster, which may grow
_SAY_AFTER = 60.0  # seconds without a single worker
_ASK_EVERY = 1.0  # seconds between two looks whether the cluster answers
_PATIENCE = 20.0  # seconds without an answer; after a minute Ray ends its process without a word
_OWN_PATIENCE = 2.0  # the same for a cluster that was started here, which does not come back
_GRACE = 20.0  # seconds for the process to end the cluster before it is killed
_FAILED_STARTS = 3
_SPAWN = multiprocessing.get_context("spawn")

_Place = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""


class RayEngine(Engine):
    """Actors of a Ray cluster, each with one run at a time.

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
        self._address, self._options, self._do_run = address, (jobs, gpus, retries), do_run
        self._process: Any = None
        self._pipe: Connection
        self._watched: dict[str, _Place] = {}
        self._answered: dict[str, float] = {}  # when each of them answered for the last time
        self._ask_at = 0.0

    def start(self) -> None:
        """Start the process that connects to the cluster."""
        if self._process is None:
            with delay_interrupts():  # a process that is half started could not be ended
                self._pipe, theirs = _SPAWN.Pipe()
                self._process = _SPAWN.Process(target=serve, args=(theirs,), name="ttvd ray")
                self._process.start()
                theirs.close()

    def run(
        self, specs: Iterable[Spec | None], config: WorkerConfig, shared: Shared | None = None
    ) -> Generator[Event, None, None]:
        """Do runs, as the engine says.

        Raises:
            ConnectionError: No cluster answers, or the cluster was lost.
        """
        if self._address is not None:
            _check_address(self._address)
        waiting = iter(specs)
        self.start()
        try:
            sets, message = share_sets(shared or {})
            if message is not None:
                yield message
            self._send((self._find_address(), *self._options, self._do_run, config, sets))
            while not isinstance(message := self._receive(), _End):
                if isinstance(message, _Ask):
                    self._send(next(waiting, _End()))
                elif isinstance(message, _Connected):
                    self._watched = dict(message.watched)
                    self._answered = dict.fromkeys(self._watched, time.monotonic())
                else:
                    yield message
            if message.error is not None:
                raise message.error
        finally:
            self.close()

    def _find_address(self) -> str | None:
        """Return the address of the cluster; where none is given, that of a cluster that this process is part of."""
        if self._address is None and (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
            return str(ray.get_runtime_context().gcs_address)
        return self._address

    def _send(self, content: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead, which the next receipt shows
            self._pipe.send(content)

    def _receive(self) -> Any:
        """Return the next message of the process, and `Idle` when there is none for a moment."""
        self._check_cluster()
        try:
            if self._pipe.poll(TICK):
                return self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(_GRACE)
            raise ConnectionError(
                f"the Ray cluster is lost: its process here {describe_exit(self._process.exitcode)}. Ray ends it when "
                f"the raylet of this machine dies. {self._advise()}"
            ) from error
        return Idle()

    def _advise(self) -> str:
        first = (
            "Start the same command again"
            if self._address is None
            else "Start the cluster and this command again"
        )
        return f"All runs that were finished are stored. {first}; it does what is missing"

    def _check_cluster(self) -> None:
        """Check from time to time that the head and the raylet answer; without them the cluster is lost.

        Raises:
            ConnectionError: One of them has not answered for a while.
        """
        if time.monotonic() < self._ask_at:
            return
        self._ask_at = time.monotonic() + _ASK_EVERY
        for name, place in self._watched.items():
            error = _knock(place)
            gone = self._address is None and isinstance(error, ConnectionRefusedError | FileNotFoundError)
            if error is None:
                self._answered[name] = time.monotonic()
            elif time.monotonic() - self._answered[name] >= (_OWN_PATIENCE if gone else _PATIENCE):
                self._process.kill()  # nothing can be ended through a cluster that is gone; trying would take a minute
                raise ConnectionError(
                    f"the Ray cluster is lost: {name} does not answer any more ({error}). {self._advise()}"
                ) from error

    def close(self) -> None:
        """End the actors and the connection to the cluster."""
        if self._process is None:
            return
        self._pipe.close()
        self._process.join(_GRACE)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._process.close()
        self._process, self._watched = None, {}


@dataclass(frozen=True)
class _Ask:
    """The process asks for the next run."""


@dataclass(frozen=True)
class _Connected:
    """The process is connected to a cluster, or is about to end the connection.

    Attributes:
        watched: Where processes listen without which the cluster is lost, by what they are; none before the end.
    """

    watched: Mapping[str, _Place]


@dataclass(frozen=True)
class _End:
    """There are no more runs; from the process: all runs are done, or it cannot go on."""

    error: Exception | None = None


class _Closed(Exception):  # noqa: N818 (not an error)
    """The command has closed its end of the pipe, or is dead."""


def serve(pipe: Connection) -> None:
    """Be the process that is connected to the cluster. It ends when the command closes the pipe."""
    # Terminals and Slurm signal all processes; the command decides. SIG_IGN would be passed on to the processes of Ray.
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: None)

    send = partial(_send, pipe)

    def ask() -> Iterator[Spec | None]:
        while True:
            send(_Ask())
            try:
                answer = pipe.recv()
            except (EOFError, OSError) as error:
                raise _Closed from error
            if isinstance(answer, _End):
                return
            yield answer

    def report(watched: Mapping[str, _Place]) -> None:
        with suppress(_Closed):  # the cluster must still be ended
            send(_Connected(watched))

    with suppress(ImportError):  # while the command makes its plan; what is missing is said later
        import ray  # noqa: F401
    with suppress(EOFError, OSError, _Closed):
        *options, config, shared = pipe.recv()
        end = _End()
        pool = RayPool(*options, connected=report)
        try:
            for event in pool.run(ask(), config, shared):
                send(event)
        except _Closed:
            return
        except (OSError, ValueError) as error:
            kind = next(kind for kind in (ConnectionError, OSError, ValueError) if isinstance(error, kind))
            end = _End(kind(str(error)))
        except Exception:
            end = _End(RuntimeError(traceback.format_exc()))
        send(end)


def _send(pipe: Connection, message: Any) -> None:
    try:
        pipe.send(message)
    except OSError as error:
        raise _Closed from error


class RayPool(WorkerPool):
    """The actors of a cluster that this process is connected to.

    An actor gets a run only when it has started, so that a run never waits for resources that no node has.

    Args:
        address: Address of the cluster; without it, one is started on this machine.
        jobs: Number of actors; as many as the cluster has room for unless given.
        gpus: Share of a GPU for each actor.
        retries: How often a run is tried again after its process has died.
        do_run: Does a run in an actor.
        connected: Takes the places at which the cluster can be watched; none before its end.
    """

    def __init__(
        self,
        address: str | None,
        jobs: int | None,
        gpus: float,
        retries: int,
        do_run: DoRun,
        *,
        connected: Callable[[Mapping[str, _Place]], object] = lambda watched: None,
    ) -> None:
        self._address, self._jobs, self._gpus, self.retries, self._do_run = (
            address,
            jobs,
            gpus,
            retries,
            do_run,
        )
        self._report_connection = connected
        self._connected = False
        self._resources: dict[str, float] = {}  # what Ray reserves for each actor
        self._create_actor: Callable[[], Any]
        self._starting: dict[Any, Any] = {}  # reference to the actor's name -> actor
        self._free: list[_Actor] = []
        self._busy: dict[Any, tuple[_Actor, Spec]] = {}  # stream of events -> actor that makes it, its run
        self._limit, self._count_at, self._failed_starts = 0, 0.0, 0
        self._say_at = time.monotonic() + _SAY_AFTER

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
        self._report_connection(_list_watched())
        yield from ()

    def _has_free_worker(self) -> bool:
        """Return whether an actor is free. Also ask for as many actors as there is room for."""
        if time.monotonic() >= self._count_at:
            self._count_at = time.monotonic() + _COUNT_EVERY
            self._limit = self._count_room() if self._jobs is None else self._jobs
        while len(self._starting) + len(self._free) + len(self._busy) < self._limit:
            actor = self._create_actor()
            self._starting[actor.introduce.remote()] = actor
        return bool(self._free)

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

            # The end of the cluster takes seconds on a busy machine, and must not look like its loss.
            self._report_connection({})
            ray.shutdown()
            self._connected = False


def _list_watched() -> dict[str, _Place]:
    """Return where the head of the cluster and the raylet of this machine listen."""
    import ray

    address = ray.get_runtime_context().gcs_address
    host, _, port = address.rpartition(":")
    watched: dict[str, _Place] = {f"its head at {address}": (host, int(port))}
    # Ray has no public name for it. Without it, the loss of the raylet is noticed when Ray ends the process.
    raylet = getattr(getattr(ray._private.worker, "_global_node", None), "raylet_socket_name", None)
    if isinstance(raylet, str) and os.path.exists(raylet):
        watched["the raylet of this machine"] = raylet
    return watched


def _knock(place: _Place) -> OSError | None:
    """Return why nobody can be reached at a place; None if somebody can."""
    try:
        if isinstance(place, str):
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(2)
                client.connect(place)
        else:
            socket.create_connection(place, timeout=2).close()
    except OSError as error:
        return error
    return None


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

    lost = (ray.exceptions.ActorUnavailableError, ray.exceptions.OwnerDiedError)
    return isinstance(error, lost) or any(word in str(error) for word in ("node has died", "owner has died"))


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
    if not colon or not port.isdecimal() or not 0 < int(port) < 2**16:
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
