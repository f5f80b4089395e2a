"""Work on parts of a batch, one core for each part."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_CACHE = 1 << 19
_DEVICE = 1 << 25


def run_parts(work: Callable[[slice], None], length: int, values: int, device: torch.device) -> None:
    """Call `work` for consecutive parts of a batch of `length` images with `values` values each.

    On CPU the parts are small enough for the cache of a core and are spread over as many threads as torch is set to
    use, each on one core: no operation waits for a barrier, and the order of additions (so every bit of the result)
    does not depend on the number of threads. On a device the parts bound the memory and run in turn.
    """
    size = max(1, (_CACHE if device.type == "cpu" else _DEVICE) // values)
    parts = [slice(start, start + size) for start in range(0, length, size)]
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        for part in parts:
            work(part)
        return
    workers = max(1, min(threads, len(parts)))
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(work, parts))
    finally:
        # The setting belongs to the thread, but also becomes the default of threads that start later.
        torch.set_num_threads(threads)
