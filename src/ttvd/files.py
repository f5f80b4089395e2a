"""Atomic writing of files: after a kill, a file is absent, the old one, or the complete new one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def open_atomic(path: str | os.PathLike[str], *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a file for writing; it appears under its name when the block ends without an error.

    Args:
        path: Path of the file; its folder is made if needed.
        sync: Whether to wait until the disk has the content, so that a power cut cannot leave the file empty. This is
            slow for many small files.

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
