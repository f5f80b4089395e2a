"""How much memory a piece of work takes at its peak."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass
class Peak:
    """Filled at the end of :func:`watch_memory`: bytes above what was held before, None where nobody can tell."""

    bytes: int | None = None


@contextmanager
def watch_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the highest memory use inside, above that at the start.

    On CUDA it is what torch allocates; on a Linux CPU the resident memory of the process, which tells little in a
    process that has done large work before: start a fresh one. Elsewhere it is not known.
    """
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device) - start
        return
    known = device.type == "cpu" and _reset_resident_peak()
    before = _read_status("VmRSS") if known else 0
    yield peak
    if known:
        peak.bytes = max(0, _read_status("VmHWM") - before)


def _reset_resident_peak() -> bool:
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return _STATUS.is_file()


def _read_status(key: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])
