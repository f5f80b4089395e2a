"""CUDA graphs: recording, and finding out beforehand whether that can work."""

import contextlib
import gc
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Record what is launched inside, into memory of the graph's own.

    As ``torch.cuda.graph`` does, which however gives all unused memory back to the system each time, and that takes
    longer than the recording. Here it does so only where the graph might find no room otherwise: it needs no more
    than the steps before it, which are a part of what is reserved.
    """
    torch.cuda.synchronize(stream.device)
    free, _ = torch.cuda.mem_get_info(stream.device)
    if free < torch.cuda.memory_reserved(stream.device):
        torch.cuda.empty_cache()
    collecting = gc.isenabled()
    gc.disable()  # other graphs must not be taken down in the middle of this one
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
    """Let what would wait for the device raise instead: a recording that it breaks off cannot be mended."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode does not find everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
