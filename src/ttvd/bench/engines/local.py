"""Runs in processes of this machine.

Why not a pool of the standard library: a process that dies breaks the whole pool, which fails the runs of all others
and does not tell who died of what; and before Python 3.14 a pool cannot be stopped in the middle of a run.
"""

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import connection, parent_process, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing  # noqa: F401 (with it, tensors travel between processes without being copied)

from ttvd.bench.engines import Event, Failed, Finished, Message, Shared, WorkerLost, WorkerPool
from ttvd.bench.engines.worker import DoRun, Worker
from ttvd.bench.job import execute as do_run
from ttvd.bench.spec import Spec, WorkerConfig
from ttvd.data.sets import ImageSet
from ttvd.interrupts import delay_interrupts

_SPAWN = multiprocessing.get_context("spawn")  # a forked process must not use CUDA or threads
_SHARED_MEMORY = "/dev/shm"
_GRACE = 5.0  # seconds for a worker to end before it is killed
_FAILED_STARTS = 3


class LocalEngine(WorkerPool):
    """Processes of this machine, each with one run at a time.

    Args:
        jobs: Number of processes.
        devices: Devices of the processes in turn; several processes can share one.
        do_run: Does a run in a worker.
    """

    def __init__(self, jobs: int = 1, devices: Sequence[str] = ("cpu",), *, do_run: DoRun = do_run) -> None:
        if jobs < 1 or not devices:
            raise ValueError(f"there must be at least one job and one device, got {jobs} and {list(devices)}")
        self._jobs, self._devices, self._do_run = jobs, devices, do_run
        self._config, self._shared = WorkerConfig(), dict[str, ImageSet]()
        self._workers: list[_Process] = []
        self._failed_starts = 0

    def start(self) -> None:
        """Begin to start the processes."""
        while len(self._workers) < self._jobs:
            self._start_worker()

    def _start_worker(self) -> "_Process":
        number = min(set(range(self._jobs)) - {worker.number for worker in self._workers})
        with delay_interrupts():  # a process that is half started could not be ended
            self._workers.append(_Process(number, self._devices[number % len(self._devices)]))
        return self._workers[-1]

    def _prepare(self, config: WorkerConfig, shared: Shared) -> Iterator[Event]:
        self._config = config
        self._shared, message = share_sets(shared)
        if message is not None:
            yield message

    def _has_free_worker(self) -> bool:
        return len(self._workers) < self._jobs or any(worker.spec is None for worker in self._workers)

    def _is_busy(self) -> bool:
        return any(worker.spec is not None for worker in self._workers)

    def _submit(self, spec: Spec) -> None:
        free = [worker for worker in self._workers if worker.spec is None]
        worker = free[0] if free else self._start_worker()
        worker.spec = spec
        if not worker.configured:
            worker.configured = True
            worker.send((self._do_run, replace(self._config, device=worker.device), self._shared))
        worker.send((spec.key, spec))

    def _collect(self, seconds: float) -> Iterator[Event | WorkerLost]:
        workers = list(self._workers)
        handles = [handle for worker in workers for handle in (worker.pipe, worker.process.sentinel)]
        ready = connection.wait(handles, seconds)
        for worker in workers:
            ended = worker.process.sentinel in ready
            if ended or worker.pipe in ready:
                yield from self._receive(worker, ended)

    def _receive(self, worker: "_Process", ended: bool) -> Iterator[Event | WorkerLost]:
        """Yield all that a worker has sent, and its death."""
        try:
            while worker.pipe.poll():
                event = worker.pipe.recv()
                worker.answered = True
                if isinstance(event, Finished | Failed):
                    worker.spec = None
                yield event
                if isinstance(event, Failed) and event.replace_worker:
                    self._end_workers([worker])
                    return
        except (EOFError, OSError):
            ended = True  # it died, perhaps in the middle of a message
        if ended:
            yield from self._handle_death(worker)

    def _handle_death(self, worker: "_Process") -> Iterator[WorkerLost]:
        worker.process.join(_GRACE)  # the pipe can close before the exit code is known
        reason = f"Worker {worker.number} {describe_exit(worker.process.exitcode)}."
        self._end_workers([worker])
        self._failed_starts = 0 if worker.answered else self._failed_starts + 1
        if self._failed_starts == _FAILED_STARTS:
            raise OSError(f"workers end before they begin, and new ones would too. {reason}")
        if worker.spec is not None:
            yield WorkerLost(worker.spec, reason)

    def _end_workers(self, workers: "list[_Process]") -> None:
        self._workers = [worker for worker in self._workers if worker not in workers]
        for worker in workers:
            worker.pipe.close()
            worker.process.terminate()
        deadline = time.monotonic() + _GRACE
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join()
            worker.process.close()

    def close(self) -> None:
        """End all processes, whatever they do."""
        self._end_workers(self._workers)


class _Process:
    """A worker process, as the driver sees it.

    Attributes:
        spec: The run that the worker has; None while it is free.
        configured: Whether the worker was told what to do runs with.
        answered: Whether the worker has sent anything.
    """

    def __init__(self, number: int, device: str) -> None:
        self.number, self.device = number, device
        self.spec: Spec | None = None
        self.configured = self.answered = False
        self.pipe, theirs = _SPAWN.Pipe()
        name = f"{number}" if device == "cpu" else f"{number} ({device})"
        self.process = _SPAWN.Process(target=serve, args=(theirs, name), name=f"ttvd worker {number}")
        with _block_sigint():
            self.process.start()
        theirs.close()

    def send(self, message: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead, which the engine will see
            self.pipe.send(message)


def serve(pipe: Connection, name: str) -> None:
    """Run a worker: receive its configuration, then do one run after the other.

    This is the main function of a worker process. The process ends when the driver closes the pipe, and at once when
    the driver dies.
    """
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes of a terminal; the driver decides
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        worker = Worker(name, *pipe.recv())
        while True:
            key, spec = pipe.recv()
            worker.run(key, spec, pipe.send)


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)  # the main thread may be in the middle of a long run for nobody


@contextmanager
def _block_sigint() -> Iterator[None]:
    """Start processes inside that never see Ctrl-C, not even while they start; this process sees it a moment later."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it would unblock the signal if it were started in between
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def describe_exit(code: int | None) -> str:
    """Describe the exit code of a process, with a hint where lack of memory is the usual reason.

    Example:
        >>> describe_exit(-15), describe_exit(3)
        ('was ended by SIGTERM', 'ended with exit code 3')
    """
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    if name == "SIGKILL":
        return "was killed (SIGKILL), as systems do when memory runs out; fewer --jobs or smaller batches need less"
    if name == "SIGBUS":
        return f"was ended by SIGBUS, as when {_SHARED_MEMORY} is full"
    return f"was ended by {name}"


def share_sets(sets: Shared) -> tuple[dict[str, ImageSet], Message | None]:
    """Move test sets to shared memory.

    Writing to shared memory that is not there kills the process, so the free space is checked first.

    Returns:
        The sets; or none, and a message, when there is not enough shared memory.
    """
    needed = sum(part.nbytes for images in sets.values() for part in (images.images, images.labels))
    try:
        free = shutil.disk_usage(_SHARED_MEMORY).free if os.path.isdir(_SHARED_MEMORY) else None
        if free is not None and needed > 0.8 * free:
            raise OSError(f"{_SHARED_MEMORY} has {free / 1e6:.0f} MB free, {needed / 1e6:.0f} MB are needed")
        for images in sets.values():
            images.images.share_memory_()
            images.labels.share_memory_()
    except (OSError, RuntimeError) as error:
        return {}, Message(f"Each worker loads the data by itself, which takes more memory: {error}.")
    return dict(sets), None
