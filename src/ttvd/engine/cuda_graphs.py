"""CUDA graphs: recording work on a GPU, and finding out beforehand whether that can work."""

import contextlib
import functools
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
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
            finally:
                graph.capture_end()
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def refusing_to_wait() -> Iterator[None]:
    """Raise an error for work that waits for the device: inside of a recording such an error cannot be mended."""
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
    def rehearsing(self, device: torch.device, strict: bool) -> Iterator[None]:
        """Run a step on the stream of recordings; ``strict`` raises an error if it waits for the device."""
        stream, current = recording_stream(device), torch.cuda.current_stream(device)
        waiting = refusing_to_wait() if strict else contextlib.nullcontext()
        with _RECORDING:
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream), waiting:
                    yield
            finally:
                current.wait_stream(stream)

    def record(self, step: Callable[[M], Tensor], adapter: M, device: torch.device) -> Callable[[], Tensor]:
        """Record a step without running it.

        Returns:
            A function that repeats the step and returns its output, which the next call overwrites.

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

    def __call__(self) -> Tensor:
        self._graph.replay()
        return self._out
