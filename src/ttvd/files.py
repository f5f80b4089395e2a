"""Writing of files: atomically, synced to the disk, and as cells of CSV that no spreadsheet runs."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_UNSAFE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\\]"  # controls, line breaks, bytes that are not UTF-8
    r"|(?<![^;])(?:[=@\uff1d\uff0b\uff0d\uff20]|[+-](?![\d.]+(?:;|$)))"  # what begins a formula and is no number
)
_ESCAPED = re.compile(rb"\\x([0-9a-f]{2})")


@contextmanager
def open_atomic(path: str | os.PathLike[str], *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a file for writing; it appears under its name when the block ends without an error.

    After a kill, the file is absent, the old one, or the complete new one.

    Args:
        path: Path of the file; its folder is made if needed.
        sync: Whether to wait until the disk has the content and the name, so that a power cut after the block changes
            nothing. This is slow for many small files.

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
    if sync:
        sync_folder(target.parent)


def is_same_file(path: Path, *others: Path) -> bool:
    """Whether a path leads to the same file as one of some others, by any link. The files need not exist.

    Example:
        >>> is_same_file(Path("a.csv"), Path("folder/../a.csv")), is_same_file(Path("a.csv"), Path("b.csv"))
        (True, False)
    """
    return any(
        path.resolve() == other.resolve() or (path.exists() and other.exists() and path.samefile(other))
        for other in others
    )


def remove_unfinished(path: str | os.PathLike[str]) -> None:
    """Remove what killed processes left behind of a file that :func:`open_atomic` was writing."""
    target = Path(path)
    name = re.compile(rf"\.{re.escape(target.name)}\.\d+\.tmp")
    for entry in target.parent.iterdir():
        if name.fullmatch(entry.name):
            entry.unlink(missing_ok=True)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Wait until the disk has the names of the files in a folder. Windows cannot do that, and does nothing here."""
    if os.name == "nt":
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def escape_cell(text: str) -> str:
    r"""Write a text as a cell of CSV: on one line, in UTF-8, and never a formula.

    ``\xNN`` stands for the byte NN. Written like that are control characters, line breaks, backslashes, bytes of file
    names that are not UTF-8, and the first character of a text that a spreadsheet may take for a formula.
    :func:`unescape_cell` is the inverse. Commas and quotes are the business of the CSV writer.

    Example:
        >>> print(escape_cell("a cat.png"), escape_cell("=1+2.png"), escape_cell("two\nlines"), escape_cell("-1"))
        a cat.png \x3d1+2.png two\x0alines -1
    """
    return _UNSAFE.sub(_spell, text)


def unescape_cell(text: str) -> str:
    r"""Return the text that :func:`escape_cell` wrote. A file name is again as Python names the file.

    Example:
        >>> unescape_cell(r"two\x0alines")
        'two\nlines'
    """
    if "\\" not in text:
        return text
    plain = _ESCAPED.sub(lambda match: bytes.fromhex(match[1].decode()), text.encode())
    return plain.decode(errors="surrogateescape")


def _spell(match: re.Match[str]) -> str:
    try:
        content = match[0].encode(errors="surrogateescape")
    except UnicodeEncodeError:  # half of a UTF-16 pair, which no file name of POSIX holds
        content = match[0].encode(errors="surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in content)
