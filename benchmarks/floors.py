"""The least that a method must do: the bare forward and backward passes of its images, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ttvd.engine.compiling import fusing
from ttvd.engine.step_runner import find_obstacle
from ttvd.methods import Adapter, Method
from ttvd.nn.norms import following_stream


class Pass(NamedTuple):
    """One pass through the network.

    Attributes:
        images: Size of the input, in batches.
        backward: Whether the gradients of what adapts are computed.
    """

    images: int
    backward: bool


def list_passes(method: Method, adapter: Adapter) -> list[Pass]:
    """The passes of a step as the registry counts them.

    Views of TTVD share a pass, as they do in its step; other methods look at the batch several times.
    """
    views = getattr(adapter, "views", 1)
    if "sites" in method.needs and views == method.forwards == method.backwards:
        return [Pass(views, True)]
    without = method.forwards - method.backwards
    return [Pass(1, True)] * method.backwards + [Pass(1, False)] * without


class Floor:
    """Passes through the very network of an adapter: its norms, its precision, its layout, compiled if it is.

    The loss is the sum of the logits, and nothing is updated.

    Args:
        adapter: Whose network is used; it should do nothing else any more.
        passes: Passes of one call.
        x: The batch.
    """

    def __init__(self, adapter: Adapter, passes: list[Pass], x: Tensor) -> None:
        self.network: nn.Module = adapter.model
        self.parameters = [p for p in self.network.parameters() if p.requires_grad]
        self.passes = passes
        self.inputs = {n: torch.cat([x] * n) if n > 1 else x for n in {one.images for one in passes}}
        self._precision, self._compiled = adapter._precision, adapter.compiled

    def __call__(self) -> list[Tensor]:
        """All passes; returns the gradients of the last that has any."""
        with fusing(self.device.type if self._compiled else None):
            return self._run()

    def _run(self) -> list[Tensor]:
        gradients: list[Tensor] = []
        for one in self.passes:
            with torch.autocast(self.device.type, self._precision) if self._precision else nullcontext():
                torch.clear_autocast_cache()
                # Averages stand still; what norms compute together in a step they compute together here.
                with torch.set_grad_enabled(one.backward), following_stream(self.network, False):
                    out = self.network(self.inputs[one.images])
            if one.backward:
                found = torch.autograd.grad(out.float().sum(), self.parameters, allow_unused=True)
                gradients = [gradient for gradient in found if gradient is not None]
        return gradients

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return next(iter(self.inputs.values())).device


def is_recorded(adapter: Adapter, device: torch.device) -> bool:
    """Whether the steps of an adapter are CUDA graphs."""
    inside: Adapter = getattr(adapter, "adapter", adapter)
    return device.type == "cuda" and inside.capture == "auto" and find_obstacle(inside, device) is None


class Recorded:
    """Work that is a CUDA graph from its second call on, as the steps of adapters are.

    Args:
        run: The work; its inputs stay where they are in memory.
        device: A CUDA device.
    """

    def __init__(self, run: Callable[[], object], device: torch.device) -> None:
        self._run, self._device = run, device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0

    def __call__(self) -> None:
        """Do the work."""
        self._calls += 1
        if self._calls == 1:
            self._run()
        elif self._graph is None:
            self._graph = self._record()
        else:
            self._graph.replay()

    def _record(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        torch.clear_autocast_cache()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._run()
        return graph
