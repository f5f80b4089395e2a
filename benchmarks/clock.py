"""Time and memory of things that are compared: they take turns, so that other load on the machine hits all alike."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Run = Callable[[], object]

WARM_UPS = {"cpu": 2, "cuda": 4}
"""Calls that are not timed; on CUDA the first is eager, the second compiles or records, later ones replay."""
ROUND = 0.05
"""Seconds that a round of one contender lasts at least; shorter calls are repeated."""
_LEAST_ROUNDS = 3


def find_device(name: str) -> torch.device:
    """A device by its name, with its number, as tensors have it."""
    device = torch.device(name)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def describe_device(device: torch.device) -> str:
    """Describe a device in words."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}"


@dataclass(frozen=True)
class Times:
    """Seconds for a call of each contender in each round."""

    rounds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        """Median seconds of a call."""
        return statistics.median(self.rounds[name])

    def ratio(self, name: str, other: str) -> float:
        """Median over the rounds of what one takes by what the other takes in the same round."""
        pairs = zip(self.rounds[name], self.rounds[other], strict=True)
        return statistics.median(a / b for a, b in pairs)


def take_turns(
    runs: Mapping[str, Run], device: torch.device, seconds: float, least: int = _LEAST_ROUNDS
) -> Times:
    """Time contenders against each other.

    Args:
        runs: Functions to time, by name.
        device: Device of the runs. On CUDA, times are those of the device's own events.
        seconds: Time for all rounds together.
        least: Smallest number of rounds.
    """
    repeats = {name: _warm_up(run, device) for name, run in runs.items()}
    rounds: dict[str, list[float]] = {name: [] for name in runs}
    end, count = time.perf_counter() + seconds, 0
    while count < least or time.perf_counter() < end:
        names = list(runs)
        for name in names if count % 2 == 0 else reversed(names):
            rounds[name].append(time_calls(runs[name], device, repeats[name]))
        count += 1
    return Times(rounds)


def time_calls(run: Run, device: torch.device, count: int) -> float:
    """Seconds for a call, over some that follow one another without a pause.

    With one thread it is the processor's time that counts, which other load on the machine does not lengthen.
    """
    if device.type != "cuda":
        now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        start = now()
        for _ in range(count):
            run()
        return (now() - start) / count
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    first.record()
    for _ in range(count):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / count


def _warm_up(run: Run, device: torch.device) -> int:
    """Call it until it is warm; returns how often it fits into a round."""
    for _ in range(WARM_UPS[device.type] - 1):
        run()
    return max(1, min(100, round(ROUND / max(time_calls(run, device, 1), 1e-6))))


def peak_memory(run: Run, device: torch.device) -> int:
    """Bytes that tensors take at most during a call, above what is there before it.

    On CUDA these are the allocator's own figures over the warm-up, recording of a graph included; on a CPU the
    storages that operations return are counted, without the scratch memory inside of an operation.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = int(torch.cuda.memory_allocated(device))
        for _ in range(WARM_UPS["cuda"]):
            run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    with StorageCounter() as counter:
        run()
    return int(counter.peak)


class StorageCounter(TorchDispatchMode):
    """Counts the bytes of the storages that are made inside and still alive.

    Attributes:
        now: Bytes at present.
        peak: The most that there were.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {
            id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in known:
                self._add(leaf.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._alive:
            return
        self._alive.add(id(storage))
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, id(storage), storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size
