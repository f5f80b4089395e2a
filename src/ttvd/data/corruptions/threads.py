"""Work on parts of a batch, one core for each part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch


def run_parts(work: Callable[[slice], None], parts: Sequence[slice]) -> None:
    """Call `work` for every part, on as many threads as torch is set to use.

    Each thread runs its operations on one core: the parts are small enough to stay in its cache, no operation waits for
    a barrier, and the order of additions (so every bit of the result) does not depend on the number of threads.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        for part in parts:
            work(part)
        return
    try:
        with ThreadPoolExecutor(
            min(threads, max(1, len(parts))), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            list(pool.map(work, parts))
    finally:
        # The setting belongs to the thread, but also becomes the default of threads that start later.
        torch.set_num_threads(threads)
