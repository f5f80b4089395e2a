"""Adapters that several runs share: what is built, and recorded as CUDA graphs, once need not be done for each run."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch

from ttvd.methods import Adapter

KEPT = 4
"""Adapters that are kept between runs; the one that was not used for longest goes."""


class CachedAdapter:
    """An adapter as a run has it.

    Attributes:
        adapter: As if just built.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._peaks: dict[int, int] = {}

    def correct_peak(self, batch_size: int, measured: int | None) -> int | None:
        """The memory that a run takes at its peak, though it may have found some of it taken already.

        Recorded steps keep their memory between runs, so that only the run that records them shows how much it is.
        """
        if not self.adapter.kept.is_cuda:
            return measured
        if measured is not None:
            self._peaks[batch_size] = max(measured, self._peaks.get(batch_size, 0))
        return self._peaks.get(batch_size)


class Adapters:
    """Lends adapters to runs, one after the other, and keeps a few of them.

    Args:
        device: Where they are. On CUDA none is kept while more than half of its memory is taken.

    Example:
        >>> import ttvd
        >>> from torch import nn
        >>> adapters = Adapters(torch.device("cpu"))
        >>> for _ in range(2):
        ...     with adapters.lend("net", lambda: print("built") or ttvd.create("bn", nn.Linear(2, 2))) as lent:
        ...         kept = lent.adapter
        built
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: OrderedDict[Hashable, CachedAdapter] = OrderedDict()

    @contextmanager
    def lend(self, key: Hashable, build: Callable[[], Adapter]) -> Iterator[CachedAdapter]:
        """An adapter as if just built. That of a run which fails is not used again.

        Args:
            key: Of all that decides what is built.
            build: Makes a fresh one.
        """
        lent = self._kept.pop(key, None)
        if lent is None:
            self._shrink(KEPT - 1)  # before, so that there is room for the new one
            lent = CachedAdapter(build())
        else:
            lent.adapter.renew()
        yield lent
        self._kept[key] = lent
        self._shrink(KEPT)

    def clear(self) -> None:
        """Keep none."""
        self._cut(0)

    def _shrink(self, count: int) -> None:
        self._cut(0 if self._is_crowded() else count)

    def _cut(self, count: int) -> None:
        while len(self._kept) > count:
            # Not left to the garbage collector: adapters are in reference cycles, and their graphs hold much memory.
            self._kept.popitem(last=False)[1].adapter.release()

    def _is_crowded(self) -> bool:
        if self._device.type != "cuda":
            return False
        free, total = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free + unused < total / 2
