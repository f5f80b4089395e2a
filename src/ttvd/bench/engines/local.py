"""Runs in processes of this machine."""

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import connection, resource_tracker
from typing import Any

import torch.multiprocessing  # noqa: F401 (with it, tensors travel between processes without being copied)

from ttvd.bench.engines.events import Broken, Event, Finished, Noted, Prepare, Shared
from ttvd.bench.engines.tasks import Lost, Tasks, drive
from ttvd.bench.engines.worker import READY, prepare_bench, serve
from ttvd.bench.spec import Spec, WorkerConfig
from ttvd.data.sets import ImageSet

_SPAWN = multiprocessing.get_context("spawn")  # a forked process must not use CUDA or threads
_SHARED_MEMORY = "/dev/shm"
_GRACE = 5.0  # seconds for a worker to end before it is killed
_FALSE_STARTS = 3


class LocalEngine:
    """Processes of this machine, each with one run at a time.

    A process that dies loses its run only, which is tried once more in a new process.

    Args:
        jobs: Processes.
        devices: Their devices in turn; several processes can have the same.
        prepare: Makes the job of a worker.
    """

    def __init__(
        self, jobs: int = 1, devices: Sequence[str] = ("cpu",), *, prepare: Prepare = prepare_bench
    ) -> None:
        if jobs < 1 or not devices:
            raise ValueError(f"there must be at least one job and one device, got {jobs} and {list(devices)}")
        self._jobs, self._devices, self._prepare = jobs, devices, prepare
        self._crew: _LocalCrew | None = None

    def start(self) -> None:
        """Begin to start the processes."""
        if self._crew is None:
            self._crew = _LocalCrew(self._jobs, self._devices, self._prepare)
            self._crew.start_all()

    def run(
        self, specs: Iterable[Spec | None], setting: WorkerConfig, shared: Shared | None = None
    ) -> Generator[Event, None, None]:
        """Do runs; see :class:`~ttvd.bench.engines.events.Engine`."""
        pool = self._crew = self._crew or _LocalCrew(self._jobs, self._devices, self._prepare)
        try:
            moved, note = share_sets(shared or {})
            if note is not None:
                yield note
            pool.settle(setting, moved)
            yield from drive(pool, Tasks(specs))
        finally:
            self.close()

    def close(self) -> None:
        """End all processes, whatever they do."""
        if self._crew is not None:
            self._crew.close()
            self._crew = None


class _Process:
    """One worker as the driver sees it. `spec` is the run that it has."""

    def __init__(self, number: int, device: str) -> None:
        self.number, self.device = number, device
        self.spec: Spec | None = None
        self.settled = False
        self.ready = False
        self.pipe, theirs = _SPAWN.Pipe()
        name = f"{number}" if device == "cpu" else f"{number} ({device})"
        self.process = _SPAWN.Process(target=serve, args=(theirs, name), name=f"ttvd worker {number}")
        with _without_interrupts():
            self.process.start()
        theirs.close()

    def send(self, message: Any) -> None:
        try:
            self.pipe.send(message)
        except (BrokenPipeError, ConnectionResetError):
            return  # it is dead, which `collect` will see

    def close(self) -> None:
        self.pipe.close()
        if self.spec is not None or not self.ready:
            self.process.terminate()  # an idle one sees the closed pipe and ends by itself

    def join(self, deadline: float) -> None:
        self.process.join(max(0.0, deadline - time.monotonic()))
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.process.close()


class _LocalCrew:
    def __init__(self, jobs: int, devices: Sequence[str], prepare: Prepare) -> None:
        self._jobs, self._devices, self._prepare = jobs, devices, prepare
        self._staff: list[_Process] = []
        self._setting, self._shared = WorkerConfig(), dict[str, ImageSet]()
        self._false_starts = 0

    def start_all(self) -> None:
        while len(self._staff) < self._jobs:
            self._start()

    def _start(self) -> _Process:
        number = min(set(range(self._jobs)) - {worker.number for worker in self._staff})
        self._staff.append(_Process(number, self._devices[number % len(self._devices)]))
        return self._staff[-1]

    def settle(self, setting: WorkerConfig, shared: dict[str, ImageSet]) -> None:
        self._setting, self._shared = setting, shared

    def has_room(self) -> bool:
        return len(self._staff) < self._jobs or any(worker.spec is None for worker in self._staff)

    def is_busy(self) -> bool:
        return any(worker.spec is not None for worker in self._staff)

    def give(self, spec: Spec) -> None:
        idle = [worker for worker in self._staff if worker.spec is None]
        worker = idle[0] if idle else self._start()
        worker.spec = spec
        if not worker.settled:
            worker.settled = True
            worker.send((self._prepare, replace(self._setting, device=worker.device), self._shared))
        worker.send((spec.key, spec))

    def collect(self, seconds: float) -> Iterator[Event | Lost]:
        staff = list(self._staff)
        handles = [handle for worker in staff for handle in (worker.pipe, worker.process.sentinel)]
        ready = connection.wait(handles, seconds)
        for worker in staff:
            ended = worker.process.sentinel in ready
            if ended or worker.pipe in ready:
                yield from self._hear(worker, ended)

    def _hear(self, worker: _Process, ended: bool) -> Iterator[Event | Lost]:
        """All that a worker has said, and its end."""
        try:
            while worker.pipe.poll():
                message = worker.pipe.recv()
                if message == READY:
                    worker.ready = True
                    continue
                if isinstance(message, Finished | Broken):
                    worker.spec = None
                yield message
                if isinstance(message, Broken) and message.spent:
                    self._dismiss(worker)
                    return
        except (EOFError, OSError):
            ended = True  # it died, perhaps in the middle of a sentence
        if ended:
            yield from self._mourn(worker)

    def _mourn(self, worker: _Process) -> Iterator[Lost]:
        spec, ready = worker.spec, worker.ready
        worker.process.join(_GRACE)  # the pipe can close before the exit code is known
        code = worker.process.exitcode
        self._dismiss(worker)
        why = f"Worker {worker.number} {describe_exit(code)}."
        self._false_starts = 0 if ready else self._false_starts + 1
        if self._false_starts == _FALSE_STARTS:
            raise OSError(f"workers end before they begin, which no new one would mend. {why}")
        if spec is not None:
            yield Lost(spec.key, why)

    def _dismiss(self, worker: _Process) -> None:
        self._staff.remove(worker)
        worker.process.terminate()
        worker.close()
        worker.join(time.monotonic() + _GRACE)

    def close(self) -> None:
        for worker in self._staff:
            worker.close()
        deadline = time.monotonic() + _GRACE
        while self._staff:
            self._staff.pop().join(deadline)


def describe_exit(code: int | None) -> str:
    """What an exit code of a process says, with a hint where memory is the usual reason.

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


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A process started here never sees Ctrl-C, not even while it starts; for this one it comes a moment later."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # would unblock the signal when started in between
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def share_sets(sets: Shared) -> tuple[dict[str, ImageSet], Noted | None]:
    """Sets in shared memory, or none and a note when there is not enough of it.

    Writing to shared memory that is not there kills the process, so the room is looked at before.
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
        return {}, Noted(f"Each worker loads the data by itself, which takes more memory: {error}.")
    return dict(sets), None
