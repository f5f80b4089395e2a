"""What a worker process does, on any engine."""

import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from ttvd.bench.engines import Advanced, Event, Failed, Finished, Shared, Started
from ttvd.bench.resources import Resources
from ttvd.bench.spec import Run, Spec, WorkerConfig

REPORT_EVERY = 0.2
"""Seconds between two reports on the progress of a run."""

DoRun = Callable[[Spec, Resources, Callable[[int, int], None]], Run]
"""Does a run, as `ttvd.bench.job` does. It is a function of a module, so that it can be sent to workers by name."""


class Worker:
    """Does one run after the other, with resources that all its runs share.

    Args:
        name: Name of the worker for people.
        do_run: Does a run.
        config: Configuration of the worker.
        shared: Test sets that need not be loaded.
    """

    def __init__(self, name: str, do_run: DoRun, config: WorkerConfig, shared: Shared) -> None:
        self.name = name
        self._do_run, self._config, self._shared = do_run, config, shared
        self._resources: Resources | None = None

    def run(self, key: str, spec: Spec, report: Callable[[Event], Any]) -> None:
        """Do a run and report what happens. The last event is `Finished` or `Failed`.

        Args:
            key: Key of the run, as the driver knows it.
            spec: The run.
            report: Takes events.
        """
        torch.set_num_threads(
            self._config.threads
        )  # the setting belongs to the thread, which may be a new one
        report(Started(key, self.name))
        result: Event
        try:
            if spec.key != key:
                raise RuntimeError(
                    f"worker {self.name} has another version of ttvd than the process that started it, and gives this "
                    "run another key. Install the same version everywhere, or, if its files were changed meanwhile, "
                    "start again"
                )
            # Made here and not before: where this fails, every run must say so.
            self._resources = self._resources or Resources(self._config, self._shared)
            result = Finished(key, self._do_run(spec, self._resources, _limit_rate(key, report)))
        except Exception as error:
            result = Failed(key, traceback.format_exc(), _is_lasting(error))
        report(result)


def _is_lasting(error: Exception) -> bool:
    """Return whether the cause of an error may stay: taken memory, or a CUDA context that refuses everything."""
    return isinstance(error, MemoryError) or "memory" in str(error) or torch.cuda.is_initialized()


def _limit_rate(key: str, report: Callable[[Event], Any]) -> Callable[[int, int], None]:
    """Return a function that reports the progress of a run a few times a second."""
    next_report = 0.0

    def report_progress(done: int, total: int) -> None:
        nonlocal next_report
        if time.monotonic() >= next_report:
            next_report = time.monotonic() + REPORT_EVERY
            report(Advanced(key, done, total))

    return report_progress
