"""Shared by the tests of the engine: batches, a recorder that works on a CPU, and quick compilers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.methods import WAITING
from ttvd.methods import Adapter

DYNAMIC = {"cotta", "memo", "rotta", "tast-bn"}
"""Methods whose steps cannot be recorded."""


def make_batches(count: int = 3, size: int = 6, side: int = 8) -> list[Tensor]:
    return list(torch.rand(count, size, 1, side, side, generator=torch.Generator().manual_seed(2)))


class Trace(TorchDispatchMode):
    """Lists the operations that run inside, with the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[object, ...]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        shapes = tuple(tuple(value.shape) if isinstance(value, Tensor) else type(value) for value in args)
        self.operations.append((str(function), shapes))
        return function(*args, **(kwargs or {}))

    def find_waiting(self) -> list[str]:
        """Operations that would wait for a device."""
        names = [str(operation[0]).removeprefix("aten.").split(".")[0] for operation in self.operations]
        return [name for name in names if name in WAITING - {"index"}]


class RerunRecorder:
    """Stands for CUDA graphs on a CPU: it repeats a step by running it once more on the same inputs.

    It refuses what a graph cannot do: a step that waits for the device, and one that does other work than when it was
    recorded. Recordings hold no reference to the adapter.

    Attributes:
        log: What was recorded and repeated, with the size of the output.
        fail_at: Refuse to record batches of this size.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fail_at: int | None = None
        self.error: type[RuntimeError] = RuntimeError

    def can_record(self, x: Tensor) -> bool:
        self._size = len(x)
        return True

    @contextmanager
    def rehearsing(self, device: torch.device, strict: bool) -> Iterator[None]:
        with Trace() as trace:
            yield
        if strict and trace.find_waiting():
            raise RuntimeError(f"called a synchronizing operation: {trace.find_waiting()[0]}")
        self._expected = trace.operations

    def record(
        self, step: Callable[[Any], Tensor], adapter: Adapter, device: torch.device
    ) -> Callable[[], Tensor]:
        size = self._size
        self.log.append(f"record {size}")
        if size == self.fail_at:
            raise self.error("this size is too much\nand more")
        known, expected = weakref.ref(adapter), self._expected

        def replay() -> Tensor:
            self.log.append(f"replay {size}")
            with Trace() as trace:
                out = step(known())
            assert trace.operations == expected, "a graph would repeat other work"
            assert not trace.find_waiting()
            return out

        return replay
