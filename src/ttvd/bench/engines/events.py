"""What an engine is, and what it says while it works."""

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ttvd.bench.spec import Run, Spec, WorkerConfig
from ttvd.data.sets import ImageSet


@dataclass(frozen=True)
class Started:
    """A worker has begun a run."""

    key: str
    worker: str


@dataclass(frozen=True)
class Advanced:
    """So many batches of a run are done."""

    key: str
    done: int
    total: int


@dataclass(frozen=True)
class Finished:
    """A run is done."""

    key: str
    run: Run


@dataclass(frozen=True)
class Broken:
    """A run has failed.

    Attributes:
        key: Of the run.
        text: The traceback, or what became of the worker.
        spent: Its process should not be used again: nobody knows what memory it holds, or in what state its device is.
    """

    key: str
    text: str
    spent: bool = False


@dataclass(frozen=True)
class Noted:
    """Something that the user should know and that stops nothing."""

    text: str


@dataclass(frozen=True)
class Waited:
    """Nothing has happened for a moment; time to look around."""


@dataclass(frozen=True)
class Passed:
    """Another process has done a run, or has failed in it; said by the grid, not by engines."""

    key: str


Event = Started | Advanced | Finished | Broken | Noted | Waited | Passed

Shared = Mapping[str, ImageSet]
Job = Callable[[Spec, Callable[[int, int], None]], Run]
Prepare = Callable[[WorkerConfig, Shared], Job]
"""Makes the job of a worker, in the worker; a function of a module, so that it can be sent there by name."""


class Engine(Protocol):
    """Does runs in other processes, several at a time."""

    def start(self) -> None:
        """Begin to start workers without waiting for them. Not needed, but saves time before :meth:`run`."""

    def run(
        self, specs: Iterable[Spec | None], setting: WorkerConfig, shared: Shared | None = None
    ) -> Generator[Event, None, None]:
        """Do runs. Workers are gone when the generator ends or is closed.

        Args:
            specs: The runs, asked for when a worker is free; None says that there is nothing now, ask again later.
            setting: For the workers.
            shared: Test sets that are in memory already, by the names that :class:`~ttvd.bench.resources.Resources` gives
                them; workers do not load them again.
        """

    def close(self) -> None:
        """End all workers, whatever they do."""
