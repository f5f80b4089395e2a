"""The worker that a Ray actor is."""

import os
import platform
import threading
import warnings
from collections.abc import Iterator, Mapping
from queue import SimpleQueue
from typing import Any

import torch

from ttvd import __version__
from ttvd.bench.engines.events import Broken, Event, Finished, Prepare
from ttvd.bench.engines.worker import Worker
from ttvd.bench.spec import Spec, WorkerConfig
from ttvd.data.sets import ImageSet


class RayWorker:
    """Does runs; made into an actor by :class:`~ttvd.bench.engines.ray.RayEngine`.

    Args:
        prepare: Makes the job.
        setting: For the job.
        sets: Ray's references to the arrays of test sets, by name.
    """

    def __init__(self, prepare: Prepare, setting: WorkerConfig, sets: Mapping[str, Any]) -> None:
        import ray

        shared = {name: _wrap(*ray.get(parts)) for name, parts in sets.items()}
        self._worker = Worker(f"{platform.node()} {os.getpid()}", prepare, setting, shared)

    def introduce(self) -> tuple[str, str]:
        """Name of the worker and version of ttvd; they can be told when the actor is ready."""
        return self._worker.name, __version__

    def do(self, key: str, spec: Spec) -> Iterator[Event]:
        """What happens in a run, as a stream that ends with `Finished` or `Broken`."""
        events: SimpleQueue[Event] = SimpleQueue()
        threading.Thread(target=self._worker.do, args=(key, spec, events.put), daemon=True).start()
        while True:
            event = events.get()
            yield event
            if isinstance(event, Finished | Broken):
                return


def _wrap(images: Any, labels: Any, classes: tuple[str, ...] | None, name: str) -> ImageSet:
    """A set whose tensors lie in Ray's shared memory."""
    with warnings.catch_warnings():
        # The arrays are read-only, as they belong to all actors of the node; nobody writes to a test set.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return ImageSet(torch.from_numpy(images), torch.from_numpy(labels), classes, name)
