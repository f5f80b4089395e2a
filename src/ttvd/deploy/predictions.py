"""Files of predictions: one row for each image, in the order of the inputs."""

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ttvd.files import open_atomic

COLUMNS = ("name", "prediction", "confidence", "class")


def check_output(path: Path, *, overwrite: bool = False) -> None:
    """Refuse a path that a file cannot be written to, before any work is done. The parent folder is created.

    Args:
        path: Path of a file.
        overwrite: Accept a file that exists.

    Raises:
        FileExistsError: The file exists.
        OSError: The path is a folder, or its parent folder does not exist and cannot be created.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the path of a file")
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"{path} exists; choose another path, or replace it with --overwrite (in Python overwrite=True)"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(f"cannot create the folder of {path}: {error}") from error


class PredictionWriter:
    """Writes predictions batch by batch.

    The rows of a batch are in ``<path>.partial`` as soon as the batch is done. That file gets its final name when
    the stream ends; a stream that is interrupted leaves it for :func:`ttvd.deploy.adapt_stream` to resume. A path
    that ends in ``.parquet`` is converted at the end and needs pyarrow.

    Args:
        path: Path of the file, ``.csv`` or ``.parquet``.
        classes: Names of the classes, which add a column.
        resume_rows: Continue the partial file after this number of rows; None begins a new file.
        overwrite: Replace a file that exists.

    Attributes:
        rows: Number of rows written so far.
    """

    def __init__(
        self,
        path: Path,
        *,
        classes: Sequence[str] | None = None,
        resume_rows: int | None = None,
        overwrite: bool = False,
    ) -> None:
        if path.suffix not in (".csv", ".parquet"):
            raise ValueError(f"predictions are written to a .csv or .parquet file, got {path.name}")
        if path.suffix == ".parquet":
            import pyarrow  # noqa: F401 - a missing package must show before the work, not after it
        self.path = path
        self.partial = partial_path(path)
        self.classes = classes
        self.rows = resume_rows or 0
        self._columns = COLUMNS if classes is not None else COLUMNS[:-1]
        check_output(path, overwrite=overwrite or resume_rows is not None)
        if resume_rows is not None:
            self._cut(resume_rows)
        elif self.partial.exists() and not overwrite:
            raise FileExistsError(
                f"{self.partial} holds the rows of an interrupted run; continue that run with --resume if it saved "
                "its state (--save-state), or discard the rows with --overwrite"
            )
        self._file = self.partial.open("w" if resume_rows is None else "a", newline="", encoding="utf-8")
        if resume_rows is None:
            csv.writer(self._file).writerow(self._columns)

    def _cut(self, rows: int) -> None:
        """Drop the rows that were written after the state was saved; they are computed again."""
        if not self.partial.is_file():
            raise FileNotFoundError(f"there is no {self.partial} to continue; leave --resume out")
        with self.partial.open(newline="", encoding="utf-8") as file:
            kept = [row for _, row in zip(range(rows + 1), csv.reader(file), strict=False)]
        if len(kept) <= rows:
            raise ValueError(
                f"{self.partial} has {max(0, len(kept) - 1)} rows, but the state was saved after {rows}"
            )
        if kept[0] != list(self._columns):
            raise ValueError(
                f"{self.partial} has the columns {', '.join(kept[0])}, this run writes {', '.join(self._columns)}; "
                "resume with the same --classes"
            )
        with open_atomic(self.partial) as target:
            text = io.TextIOWrapper(target, encoding="utf-8", newline="")
            csv.writer(text).writerows(kept)
            text.detach()

    def write(self, names: Sequence[str], predictions: Sequence[int], confidences: Sequence[float]) -> None:
        """Append the rows of a batch and flush them to the operating system."""
        for name, label, confidence in zip(names, predictions, confidences, strict=True):
            word = () if self.classes is None else (self.classes[label],)
            csv.writer(self._file).writerow((name, label, f"{confidence:.6f}", *word))
        self._file.flush()
        self.rows += len(names)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if kind is not None:
            if self.rows == 0:
                self.partial.unlink()
        elif self.path.suffix == ".parquet":
            self._convert()
        else:
            self.partial.replace(self.path)

    def _convert(self) -> None:
        import pyarrow
        from pyarrow import csv as arrow_csv
        from pyarrow import parquet

        # The types are explicit because names and classes that look like numbers must stay text.
        types = (pyarrow.string(), pyarrow.int64(), pyarrow.float64(), pyarrow.string())
        options = arrow_csv.ConvertOptions(column_types=dict(zip(COLUMNS, types, strict=True)))
        with open_atomic(self.path) as file:
            parquet.write_table(arrow_csv.read_csv(self.partial, convert_options=options), file)
        self.partial.unlink()


def partial_path(path: Path) -> Path:
    """Return where the rows of a stream are until it ends.

    Example:
        >>> partial_path(Path("predictions.csv")).name
        'predictions.csv.partial'
    """
    return path.with_name(path.name + ".partial")
