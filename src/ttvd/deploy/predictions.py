"""Files of predictions: one row for each image, in the order of the inputs."""

import csv
import io
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from ttvd.deploy.states import Position
from ttvd.files import escape_cell, open_atomic, remove_unfinished, sync_folder, unescape_cell

COLUMNS = ("name", "prediction", "confidence", "class")
NAME_BYTES = "name_bytes"
"""Column of a Parquet file for the bytes of names that are not UTF-8."""
_JOURNAL_KEY = b"ttvd.rows"
_CHUNK = 1 << 20
_ROWS_AT_ONCE = 1 << 16


def check_output(path: Path, *, overwrite: bool = False) -> None:
    """Refuse a path that a file cannot be written to, before any work is done. The parent folder is created.

    Args:
        path: Path of a file.
        overwrite: Accept a file that exists.

    Raises:
        FileExistsError: The file exists.
        OSError: The path is no file, or its parent folder cannot be created or cannot be written to.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the path of a file")
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not an ordinary file; give another path")
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"{path} exists; choose another path, or replace it with --overwrite (in Python overwrite=True)"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(f"cannot create the folder of {path}: {error}") from error
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"cannot write to the folder of {path}; choose another path")


class PredictionWriter:
    r"""Appends predictions to a journal, which becomes the file of predictions when the stream ends.

    The journal is ``<path>.partial``, a CSV file. What is in it is never changed: rows are appended, and only a tail
    that no state counts is cut off. At the end it gets its final name, or is converted to Parquet. Names and classes
    are written by :func:`ttvd.files.escape_cell`, so that each row is one line. In a Parquet file they are as they
    were. A name that is not UTF-8 keeps its escapes there, and its bytes are in the column ``name_bytes``, which the
    file has only then.

    Opening the journal checks it and keeps other processes out. :meth:`begin` is the first to change it.

    Args:
        path: Path of the file, ``.csv`` or ``.parquet``.
        classes: Names of the classes, which add a column.
        resume: Position after which the journal is continued; None begins a new one.
        overwrite: Replace a file that exists, and the journal of an interrupted stream.

    Attributes:
        partial: Path of the journal.
        size: Number of bytes of the journal.
        checksum: CRC-32 of these bytes.

    Raises:
        FileExistsError: The file, or the journal of another stream, exists.
        ValueError: The journal does not hold the rows that it should be continued after.
        BlockingIOError: Another process is writing the same file.
        OSError: The path cannot be written to.
    """

    def __init__(
        self,
        path: Path,
        *,
        classes: Sequence[str] | None = None,
        resume: Position | None = None,
        overwrite: bool = False,
    ) -> None:
        if path.suffix not in (".csv", ".parquet"):
            raise ValueError(f"predictions are written to a .csv or .parquet file, got {path.name}")
        if path.suffix == ".parquet":
            import pyarrow  # noqa: F401 - a missing package must show before the work, not after it
        self.path = path
        self.partial = partial_path(path)
        self.size, self.checksum = (0, 0) if resume is None else (resume.size, resume.checksum)
        self._classes = None if classes is None else [escape_cell(name) for name in classes]
        self._columns = COLUMNS if classes is not None else COLUMNS[:-1]
        self._file: int | None = None
        self._may_discard = False
        check_output(path, overwrite=overwrite or resume is not None)
        check_output(self.partial, overwrite=True)
        if resume is None:
            self._refuse_journal(overwrite)
        elif resume.size and self._find_size() < resume.size and self._is_done():
            self._remove_empty()
            return
        self._open()
        try:
            if resume is not None:
                self._check_journal(resume)
        except BaseException:
            self.close()
            raise

    def _refuse_journal(self, overwrite: bool) -> None:
        if not overwrite and self._find_size():
            raise FileExistsError(
                f"{self.partial} holds the rows of an interrupted run; continue that run with --resume if it saved "
                "its state (--save-state), or discard the rows with --overwrite"
            )

    def _remove_empty(self) -> None:
        """Remove the journal of a process that was to replace the file of this stream, and died before it began."""
        if self.partial.exists():
            self._open()
            self._may_discard = self._find_size() == 0
            self.discard()
            self.close()

    def _find_size(self) -> int:
        return self.partial.stat().st_size if self.partial.exists() else 0

    def _is_done(self) -> bool:
        """Whether the final file was made of the journal that is to be continued."""
        if not self.path.is_file():
            return False
        if self.path.suffix == ".parquet":
            return _read_mark(self.path) == self._mark()
        return self.path.stat().st_size == self.size and _compute_crc(self.path, self.size) == self.checksum

    def _open(self) -> None:
        self._may_discard = self._is_new = not self.partial.exists()
        self._file = os.open(self.partial, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        try:
            _lock(self._file, self.partial)
        except BaseException:
            os.close(self._file)
            raise

    def _check_journal(self, position: Position) -> None:
        remedy = "begin again with --overwrite and without --resume"
        if self._is_new and position.size:
            raise FileNotFoundError(f"there is no {self.partial} to continue; {remedy}")
        if self._find_size() < position.size:
            rows = max(0, self.partial.read_bytes().count(b"\n") - 1)
            raise ValueError(
                f"{self.partial} has {rows} rows, but the state was saved after {position.rows}; {remedy}"
            )
        if _compute_crc(self.partial, position.size) != position.checksum:
            raise ValueError(
                f"the first {position.rows} rows of {self.partial} are not those of the run that saved the state; "
                f"{remedy}"
            )

    def begin(self) -> None:
        """Cut off the rows that the state does not count, and write the header of a new journal."""
        if self._file is None:
            return
        self._may_discard = True
        remove_unfinished(self.path)
        if os.fstat(self._file).st_size > self.size:
            os.ftruncate(self._file, self.size)
        os.lseek(self._file, self.size, os.SEEK_SET)
        if self.size == 0:
            self._append(_format_rows([self._columns]))
        self.sync()
        sync_folder(self.partial.parent)

    def write(self, names: Sequence[str], predictions: Sequence[int], confidences: Sequence[float]) -> None:
        """Append the rows of a batch. A kill of the process does not lose them, a power cut may until :meth:`sync`."""
        columns: list[Sequence[object]] = [[escape_cell(name) for name in names], predictions]
        columns.append([f"{confidence:.6f}" for confidence in confidences])
        if self._classes is not None:
            columns.append([self._classes[label] for label in predictions])
        self._append(_format_rows(list(zip(*columns, strict=True))))

    def _append(self, content: bytes) -> None:
        assert self._file is not None, "the stream has ended"
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except BaseException as error:  # such as a full disk: no half row stays behind
            if isinstance(error, OSError):
                error.filename = str(self.partial)
            os.ftruncate(self._file, self.size)
            os.lseek(self._file, self.size, os.SEEK_SET)
            raise
        self.size += len(content)
        self.checksum = zlib.crc32(content, self.checksum)

    def sync(self) -> None:
        """Wait until the disk has all rows."""
        if self._file is not None:
            os.fsync(self._file)

    def finish(self) -> None:
        """Turn the journal into the final file. All rows must be synced."""
        if self._file is None:
            return
        if os.name == "nt":  # where a file that is open can be neither renamed nor removed
            self.close()
        if self.path.suffix == ".parquet":
            with open_atomic(self.path) as file:
                _convert(self.partial, file, self._mark())
            self.partial.unlink()
        else:
            self.partial.replace(self.path)
            sync_folder(self.path.parent)

    def discard(self) -> None:
        """Remove a journal without rows. What an earlier stream wrote stays until :meth:`begin`."""
        if self._file is not None and self._may_discard:
            if os.name == "nt":
                self.close()
            self.partial.unlink(missing_ok=True)

    def close(self) -> None:
        """Let other processes open the journal."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _mark(self) -> bytes:
        return f"{self.size} {self.checksum}".encode()


def partial_path(path: Path) -> Path:
    """Return where the rows of a stream are until it ends.

    Example:
        >>> partial_path(Path("predictions.csv")).name
        'predictions.csv.partial'
    """
    return path.with_name(path.name + ".partial")


def _format_rows(rows: Sequence[Sequence[object]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def _compute_crc(path: Path, size: int) -> int:
    """Return the CRC-32 of the first bytes of a file."""
    checksum = 0
    with path.open("rb") as file:
        while size and (content := file.read(min(size, _CHUNK))):
            checksum, size = zlib.crc32(content, checksum), size - len(content)
    return checksum


def _lock(file: int, path: Path) -> None:
    """Keep other processes out of a journal. The system releases the lock when the process ends in any way.

    Windows has no such lock; there, other processes are not kept out.
    """
    if sys.platform == "win32":
        return
    import fcntl

    busy = BlockingIOError(f"another process is writing {path}; wait for it, or choose another path")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise busy from error
    except OSError:
        return  # a file system without locks
    if not path.exists() or not os.path.samestat(os.fstat(file), os.stat(path)):
        raise busy  # it has just ended, and this is its file under the final name


# Parquet


def _convert(journal: Path, file: object, mark: bytes) -> None:
    """Write a journal as Parquet, some rows at a time."""
    import pyarrow
    from pyarrow import parquet

    with journal.open(newline="", encoding="utf-8") as text:
        # Escapes are rare, so a search for the letters finds out quickly that no name needs its bytes.
        has_bytes = any("\\x" in line and not _is_utf8(unescape_cell(line)) for line in text)
    types = (pyarrow.string(), pyarrow.int64(), pyarrow.float64(), pyarrow.string())
    with journal.open(newline="", encoding="utf-8") as text:
        reader = csv.reader(text)
        fields = list(zip(next(reader), types, strict=False))
        fields += [(NAME_BYTES, pyarrow.binary())] if has_bytes else []
        schema = pyarrow.schema(fields, metadata={_JOURNAL_KEY: mark})
        with parquet.ParquetWriter(file, schema) as writer:
            while rows := list(islice(reader, _ROWS_AT_ONCE)):
                names, labels, confidences, *words = zip(*rows, strict=True)
                columns: list[Iterator[object]] = [
                    map(_restore, names),
                    map(int, labels),
                    map(float, confidences),
                ]
                columns += [map(_restore, column) for column in words]
                columns += [map(_find_bytes, names)] if has_bytes else []
                arrays = [
                    pyarrow.array(column, type=field.type)
                    for column, field in zip(columns, schema, strict=True)
                ]
                writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _restore(cell: str) -> str:
    """Return the text of a cell, or the cell as it is if the text is not UTF-8."""
    text = unescape_cell(cell)
    return text if _is_utf8(text) else cell


def _find_bytes(cell: str) -> bytes | None:
    text = unescape_cell(cell)
    return None if _is_utf8(text) else text.encode(errors="surrogateescape")


def _read_mark(path: Path) -> bytes | None:
    """Return what a Parquet file says about the journal that it was made of."""
    import pyarrow
    from pyarrow import parquet

    try:
        metadata = parquet.read_schema(path).metadata or {}
    except (OSError, pyarrow.ArrowInvalid):
        return None
    found: bytes | None = metadata.get(_JOURNAL_KEY)
    return found
