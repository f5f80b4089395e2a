"""CUDA graphs: recording work on a GPU, and finding out beforehand whether that can work."""

import contextlib
import functools
import gc
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from operator import call
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Record the work that is launched inside, into memory of the graph's own.

    ``torch.cuda.graph`` does the same, but returns all unused memory to the system each time, which takes longer than
    the recording. Here that happens only if the graph might find no room otherwise. The graph needs no more memory
    than the steps before it, which is a part of what is reserved.
    """
    torch.cuda.synchronize(stream.device)
    free, _ = torch.cuda.mem_get_info(stream.device)
    if free < torch.cuda.memory_reserved(stream.device):
        torch.cuda.empty_cache()
    collecting = gc.isenabled()
    gc.disable()  # no other graph must be destroyed in the middle of this recording
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error tells more
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def refusing_to_wait() -> Iterator[None]:
    """Raise an error for work that waits for the device. This holds for all threads of the process."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode does not detect everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@functools.cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream on which a device records.

    The allocator keeps unused memory for each stream apart, so a new stream for each recording would let the reserved
    memory grow with the number of recordings.
    """
    return torch.cuda.Stream(device)


_RECORDING = threading.Lock()  # all threads of a process share the stream of recordings


class CudaRecorder:
    """Records steps as CUDA graphs."""

    def can_record(self, x: Tensor) -> bool:
        """Whether a batch lies on a CUDA device."""
        return x.is_cuda

    @contextlib.contextmanager
    def rehearsing(self, device: torch.device) -> Iterator[None]:
        """Run a step on the stream of recordings."""
        stream, current = recording_stream(device), torch.cuda.current_stream(device)
        with _RECORDING:
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                current.wait_stream(stream)

    def record(
        self, step: Callable[[M], Tensor], adapter: M, device: torch.device
    ) -> Callable[[Callable[[], None]], Tensor]:
        """Record a step without running it.

        Returns:
            A function that repeats the step and returns its output, which the next call overwrites. It gets a function
            and calls that together with the step.

        Raises:
            RuntimeError: The step cannot be recorded. The memory of the attempt is free again.
        """
        graph = torch.cuda.CUDAGraph()
        # Copies of weights that autocast keeps would be read by every replay where they lie now.
        torch.clear_autocast_cache()
        try:
            with _RECORDING, capturing(graph, recording_stream(device)):
                out = step(adapter)
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                graph.reset()
            raise
        finally:
            torch.clear_autocast_cache()
        return _Replay(graph, out)


class _Replay:
    def __init__(self, graph: torch.cuda.CUDAGraph, out: Tensor) -> None:
        self._graph, self._out = graph, out
        # The method of the base class is no Python code.
        self._launch = partial(torch._C._CUDAGraph.replay, graph)

    def __call__(self, commit: Callable[[], None]) -> Tensor:
        # Python handles signals between two of its own instructions; here are none between launch and commit.
        calls: tuple[Callable[[], object], ...] = (self._launch, commit)
        deque(map(call, calls), maxlen=0)
        return self._out
