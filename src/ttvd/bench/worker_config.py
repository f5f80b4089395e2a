"""Where and on what runs are done: circumstances that do not decide their rows."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WorkerConfig:
    """Circumstances of a worker.

    Attributes:
        data: Folder that holds the data sets; the digits need none.
        checkpoints: Folder of the source models; the package's own unless given.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        threads: Threads of a run on a CPU; the last digits of results can depend on them.
        compiled: Whether ``torch.compile`` fuses the steps; the last digits can depend on it too.
    """

    data: Path | None = None
    checkpoints: Path | None = None
    device: str = "cpu"
    threads: int = 1
    compiled: bool = False
