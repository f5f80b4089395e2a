"""One export at a time in a folder, and what killed ones left there."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".ttvd-export.lock"

_TEMPORARY = re.compile(r"\.(.+)\.\d+\.tmp")
"""Names that `ttvd.files.open_atomic` gives to unfinished files."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other exports out of a folder, which is made if needed.

    The system gives the lock back when the process ends in whatever way, so that a killed run blocks nobody.
    Windows has no such lock; there, nobody is kept out.

    Raises:
        BlockingIOError: Another run holds the folder.
        NotADirectoryError: A file is where the folder should be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(
            f"the result goes into a folder, but {error.filename} is a file or lies below one; choose another name"
        ) from error
    if sys.platform == "win32":
        yield
        return
    file = _acquire(folder)
    try:
        yield
    finally:
        # Removed while it is held: whoever opened it meanwhile sees in `_acquire` that it is gone.
        (folder / LOCK).unlink(missing_ok=True)
        os.close(file)


def _acquire(folder: Path) -> int:
    import fcntl

    path = folder / LOCK
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        except BlockingIOError as error:
            os.close(file)
            raise BlockingIOError(
                f"another run is writing to {folder}; wait for it, or choose another folder"
            ) from error
        except OSError:
            os.close(file)
            raise
        os.close(file)


def is_temporary(name: str, of: str) -> bool:
    """Whether a file has the name of an unfinished version of another.

    Example:
        >>> is_temporary(".fog.npy.123.tmp", "fog.npy"), is_temporary(".notes.tmp", "fog.npy")
        (True, False)
    """
    match = _TEMPORARY.fullmatch(name)
    return match is not None and match[1] == of


def remove_temporaries(folder: Path, is_made: Callable[[str], bool]) -> None:
    """Delete what killed runs left unfinished; the caller holds the lock.

    Args:
        folder: Of the export; folders below it are searched too.
        is_made: Whether the export makes a file of this path, relative to the folder and with slashes.
    """
    for place, _, names in os.walk(folder):
        below = Path(place).relative_to(folder)
        for name in names:
            match = _TEMPORARY.fullmatch(name)
            if match is not None and is_made((below / match[1]).as_posix()):
                Path(place, name).unlink()
