"""Files that are either absent, the old one or the complete new one, also after a kill."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def open_atomic(path: str | os.PathLike[str], *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under its name when the block ends without an error.

    Args:
        path: Where the file will be; its folder is made if needed.
        sync: Wait until the disk has it, so that a power cut cannot leave it empty; slow for many small files.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with open_atomic(Path(folder, "a.txt")) as file:
        ...         _ = file.write(b"whole")
        ...     sorted(os.listdir(folder))
        ['a.txt']
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
