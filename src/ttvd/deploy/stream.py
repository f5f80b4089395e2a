"""The stream: batches through an adapter, predictions to a file, a summary at the end."""

import csv
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from torch import Tensor

from ttvd.deploy.inputs import Batch, Inputs
from ttvd.methods import Adapter
from ttvd.methods.shared.losses import entropy

COLUMNS = ("name", "prediction", "confidence", "class")


@dataclass
class Summary:
    """What happened along the stream.

    Attributes:
        entropies: Mean entropy of the predictions of each batch, as a share of ln k.
        kept: Share of each batch that was used to adapt.
        histogram: Predictions of each class.
        unreadable: Names and reasons of images that were left out.
        moved: Length of the change of the adapted parameters in this run, over their length at its start.
    """

    entropies: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    histogram: dict[int, int] = field(default_factory=dict)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    moved: float = 0.0

    @property
    def images(self) -> int:
        """Images that were predicted."""
        return sum(self.histogram.values())


class PredictionFile:
    """Predictions on their way to a file: rows are on disk as soon as their batch is done.

    They are in ``<name>.partial`` until the end; a stream that was cut off leaves what it had there. A name that ends
    in ``.parquet`` is converted at the end and needs pyarrow.

    Args:
        path: The file to be.
        classes: Names of the classes, for a column more.
        rows: Continue a partial file after so many rows; None to begin a new one.

    Attributes:
        rows: Rows written so far.
    """

    def __init__(self, path: Path, *, classes: Sequence[str] | None = None, rows: int | None = None) -> None:
        if path.suffix not in (".csv", ".parquet"):
            raise ValueError(f"predictions go to a .csv or .parquet file, got {path.name}")
        if path.suffix == ".parquet":
            import pyarrow  # noqa: F401 - a missing package must show before the work, not after it
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        self.classes = classes
        self.rows = rows or 0
        if rows is None and self.partial.exists():
            raise ValueError(
                f"{self.partial} holds the rows of a run that was cut off; continue that one with --resume if it "
                "saved its state (--save-state), or delete the file"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = self._begin() if rows is None else self._continue(rows)

    def _begin(self) -> TextIO:
        file = self.partial.open("w", newline="", encoding="utf-8")
        csv.writer(file).writerow(COLUMNS if self.classes is not None else COLUMNS[:-1])
        return file

    def _continue(self, rows: int) -> TextIO:
        """Rows that were written after the state was saved are written again."""
        if not self.partial.is_file():
            raise ValueError(f"there is no {self.partial} to continue; leave --resume out")
        with self.partial.open(newline="", encoding="utf-8") as file:
            kept = [row for _, row in zip(range(rows + 1), csv.reader(file), strict=False)]
        if len(kept) <= rows:
            raise ValueError(f"{self.partial} has {len(kept) - 1} rows, the state was saved after {rows}")
        file = self.partial.open("w", newline="", encoding="utf-8")
        csv.writer(file).writerows(kept)
        return file

    def write(self, names: Sequence[str], labels: Sequence[int], confidences: Sequence[float]) -> None:
        """Add rows and hand them to the system."""
        known: Iterable[tuple[str, ...]] = ((),) * len(names)
        if self.classes is not None:
            known = ((self.classes[label],) for label in labels)
        columns = zip(names, labels, confidences, known, strict=True)
        csv.writer(self._file).writerows((n, label, f"{c:.6f}", *more) for n, label, c, more in columns)
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
            return
        if self.path.suffix == ".parquet":
            self._convert()
        else:
            self.partial.replace(self.path)

    def _convert(self) -> None:
        import pyarrow
        from pyarrow import csv as arrow_csv
        from pyarrow import parquet

        # Named types: names and classes that look like numbers must stay text.
        kinds = (pyarrow.string(), pyarrow.int64(), pyarrow.float64(), pyarrow.string())
        options = arrow_csv.ConvertOptions(column_types=dict(zip(COLUMNS, kinds, strict=True)))
        converted = self.path.with_name(self.path.name + ".tmp")
        parquet.write_table(arrow_csv.read_csv(self.partial, convert_options=options), converted)
        converted.replace(self.path)
        self.partial.unlink()


def adapt_batch(
    adapter: Adapter, batch: Batch, inputs: Inputs, out: PredictionFile, summary: Summary
) -> None:
    """Predict and adapt to one batch, write its rows and take note."""
    summary.unreadable += [(inputs.names[p], reason) for p, reason in batch.unreadable]
    if batch.images is None:
        return
    probe = adapter.probe
    try:
        logits = adapter(batch.images.to(probe.device, probe.dtype)).float()
    except RuntimeError as error:
        shape = tuple(batch.images.shape[1:])
        first = str(error).splitlines()[0]
        raise ValueError(
            f"the model cannot take images of size {shape}: {first} (of pictures, --resize and --crop change the "
            "size, --gray makes one channel)"
        ) from error
    if out.classes is not None and len(out.classes) != logits.shape[1]:
        raise ValueError(f"there are {len(out.classes)} names of classes and {logits.shape[1]} outputs")
    confidences, labels = (values.tolist() for values in logits.softmax(1).max(1))
    out.write([inputs.names[p] for p in batch.positions], labels, confidences)
    for label in labels:
        summary.histogram[label] = summary.histogram.get(label, 0) + 1
    scale = math.log(max(logits.shape[1], 2))
    summary.entropies.append(float(entropy(logits).mean()) / scale)
    summary.kept.append(float(adapter.kept))


def measure_move(adapter: Adapter, start: dict[str, Tensor]) -> float:
    """How far the adapted parameters are from where they started, as a share of their length."""
    names = [name for name, p in adapter.named_parameters() if p.requires_grad]
    now = adapter.snapshot()
    if not names:
        return 0.0
    change = sum(float((now[name] - start[name]).double().square().sum()) for name in names)
    length = sum(float(start[name].double().square().sum()) for name in names)
    return math.sqrt(change / length) if length > 0 else math.inf
