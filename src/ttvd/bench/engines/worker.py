"""What a worker does, on any engine; and the process that a local one is."""

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from typing import Any

import torch

from ttvd.bench.engines.events import Advanced, Broken, Event, Finished, Job, Prepare, Shared, Started
from ttvd.bench.job import execute
from ttvd.bench.resources import Resources
from ttvd.bench.spec import Run, Spec, WorkerConfig

REPORT_EVERY = 0.2  # seconds between two reports on one run
_MIXED = (
    "Worker {} has another version of ttvd than the process that started it, and gives this run another key. Install "
    "the same version everywhere, or, if its files were changed meanwhile, start again."
)


def prepare_bench(setting: WorkerConfig, shared: Shared) -> Job:
    """The job of a real worker: runs with what one resources has."""
    return partial(_execute, Resources(setting, shared))


def _execute(resources: Resources, spec: Spec, progress: Callable[[int, int], None]) -> Run:
    return execute(spec, resources, progress)


class Worker:
    """Does one run after the other and says what happens.

    Args:
        name: Of this worker, for people.
        prepare: Makes the job.
        setting: For the job.
        shared: For the job.
    """

    def __init__(self, name: str, prepare: Prepare, setting: WorkerConfig, shared: Shared) -> None:
        self.name = name
        self._threads = setting.threads
        self._failure: str | None = None
        torch.set_num_threads(setting.threads)
        try:
            self._job = prepare(setting, shared)
        except Exception:
            # It is the failure of every run that comes here, and each of them must say so.
            self._failure = traceback.format_exc()

    def do(self, key: str, spec: Spec, say: Callable[[Event], Any]) -> None:
        """Do a run; what is said ends with `Finished` or `Broken`.

        Args:
            key: Of the run, as the driver knows it.
            spec: The run.
            say: Takes what happens.
        """
        torch.set_num_threads(self._threads)  # it belongs to the thread, which may be a new one
        say(Started(key, self.name))
        if self._failure is not None:
            say(Broken(key, self._failure))
        elif spec.key != key:
            say(Broken(key, _MIXED.format(self.name)))
        else:
            say(self._try(spec, say))

    def _try(self, spec: Spec, say: Callable[[Event], Any]) -> Finished | Broken:
        try:
            return Finished(spec.key, self._job(spec, _Reporter(spec.key, say)))
        except Exception as error:
            return Broken(spec.key, traceback.format_exc(), _is_lasting(error))


def _is_lasting(error: Exception) -> bool:
    """Whether what caused an error may still be there: taken memory, or a CUDA context that refuses everything."""
    return isinstance(error, MemoryError) or "memory" in str(error) or torch.cuda.is_initialized()


class _Reporter:
    """Passes on how far a run is, a few times a second."""

    def __init__(self, key: str, say: Callable[[Event], Any]) -> None:
        self._key, self._say, self._next = key, say, 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + REPORT_EVERY
            self._say(Advanced(self._key, done, total))


READY = "ready"


def serve(pipe: Connection, name: str) -> None:
    """The main function of a local worker: first its circumstances arrive, then one run after the other.

    It ends when the driver closes the pipe, and at once when the driver dies.
    """
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes of a terminal; the driver decides
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        worker = Worker(name, *pipe.recv())
        pipe.send(READY)
        while True:
            key, spec = pipe.recv()
            worker.do(key, spec, pipe.send)


def _leave_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)  # the main thread may be in the middle of a long run for nobody
