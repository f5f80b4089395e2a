"""Shared by the tests of the engine: batches, a recorder that works on a CPU, and quick compilers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.methods import WAITING
from ttvd.engine.compiling import compile_once
from ttvd.methods import Adapter
from ttvd.nn.norms import Statistics, StreamNorm, apply_statistics

MIXED = ["source:renorm", "prior:0.2", "prior:0.2:renorm", "count:16:renorm", "momentum:0.1:renorm"]
MIXED += ["track:12:100", "track:12:100:renorm", "track:0:inf:renorm", "momentum:1:renorm"]
"""Policies for the statistics of batch norms that mix two kinds."""
DYNAMIC = {"cotta", "memo", "petta", "rotta", "tast-bn"}
"""Methods whose steps cannot be recorded."""


def make_batches(count: int = 3, size: int = 6, side: int = 8) -> list[Tensor]:
    return list(torch.rand(count, size, 1, side, side, generator=torch.Generator().manual_seed(2)))


class Trace(TorchDispatchMode):
    """Lists the operations that run inside, with the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[object, ...]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and what keeps the compiler away would be called before every operation."""
        return False

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
    def rehearsing(self, device: torch.device) -> Iterator[None]:
        with Trace() as trace:
            yield
        self._expected, self._waiting = trace.operations, trace.find_waiting()

    def record(
        self, step: Callable[[Any], Tensor], adapter: Adapter, device: torch.device
    ) -> Callable[[Callable[[], None]], Tensor]:
        size = self._size
        if self._waiting:
            raise RuntimeError(f"called a synchronizing operation: {self._waiting[0]}")
        self.log.append(f"record {size}")
        if size == self.fail_at:
            raise self.error("this size is too much\nand more")
        known, expected = weakref.ref(adapter), self._expected

        def replay(commit: Callable[[], None]) -> Tensor:
            self.log.append(f"replay {size}")
            with Trace() as trace:
                out = step(known())
            assert trace.operations == expected, "a graph would repeat other work"
            assert not trace.find_waiting()
            commit()
            return out

        return replay


@contextmanager
def compiling_by(backend: Any) -> Iterator[None]:
    """Let everything that is compiled inside without a backend be compiled by this one, and not be kept."""
    whole = torch.compile
    compile_once.cache_clear()
    with patch("torch.compile", lambda code, **options: whole(code, **{"backend": backend, **options})):
        yield
    compile_once.cache_clear()


def make_layer(channels: int = 3, affine: bool = True, dtype: torch.dtype = torch.float64) -> nn.BatchNorm2d:
    generator = torch.Generator().manual_seed(0)
    layer = nn.BatchNorm2d(channels, affine=affine).eval()
    for tensor, low in ((layer.running_mean, -1.0), (layer.running_var, 0.5)):
        assert tensor is not None
        tensor.uniform_(low, 2.0, generator=generator)
    if affine:
        with torch.no_grad():
            layer.weight.uniform_(0.5, 2.0, generator=generator)
            layer.bias.uniform_(-1.0, 1.0, generator=generator)
    return layer.to(dtype)


def make_norm(text: str, **options: object) -> StreamNorm:
    norm = apply_statistics(make_layer(**options), Statistics.parse(text))  # type: ignore[arg-type]
    return cast(StreamNorm, norm)


def make_input(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(shape, generator=generator, dtype=torch.float64) + 0.7


def write_out(x: Tensor, norm: StreamNorm, share: float) -> Tensor:
    """The norm on paper, ``share`` that of the batch; renormalised with what is constant detached."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    shape = (1, -1) + (1,) * (x.ndim - 2)
    dims = [0, *range(2, x.ndim)]
    own_mean = x.mean(dims)
    own_std = ((x - own_mean.view(shape)) ** 2).mean(dims).add(norm.eps).sqrt()
    mean = (1 - share) * norm.running_mean + share * own_mean
    std = ((1 - share) * norm.running_var + share * (own_std**2 - norm.eps) + norm.eps).sqrt()
    if norm.statistics.renorm:
        r, d = (own_std / std).detach(), ((own_mean - mean) / std).detach()
        out = (x - own_mean.view(shape)) / own_std.view(shape) * r.view(shape) + d.view(shape)
    else:
        out = (x - mean.view(shape)) / std.view(shape)
    return out if not norm.affine else out * norm.weight.view(shape) + norm.bias.view(shape)
