"""The stream: batches through an adapter, predictions to a file, a summary at the end."""

import csv
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from torch import Tensor

from ttvd.adapters import Adapter
from ttvd.adapters.objectives import entropy
from ttvd.deploy.inputs import Batch, Inputs

COLUMNS = ("name", "prediction", "class", "confidence")


@dataclass
class Summary:
    """What happened along the stream.

    Attributes:
        entropies: Mean entropy of the predictions of each batch, as a share of ln k.
        kept: Share of each batch that was used to adapt.
        histogram: Predictions of each class.
        unreadable: Names and reasons of images that were left out.
        moved: Length of the change of the adapted parameters over the length of the source's.
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
    """

    def __init__(self, path: Path) -> None:
        if path.suffix not in (".csv", ".parquet"):
            raise ValueError(f"predictions go to a .csv or .parquet file, got {path.name}")
        if path.suffix == ".parquet":
            import pyarrow  # noqa: F401 - a missing package must show before the work, not after it
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = self.partial.open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        self._writer.writerow(COLUMNS)

    def write(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add rows and hand them to the system."""
        self._writer.writerows(rows)
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        if kind is not None:
            return
        if self.path.suffix == ".parquet":
            from pyarrow import csv as arrow_csv
            from pyarrow import parquet

            converted = self.path.with_name(self.path.name + ".tmp")
            parquet.write_table(arrow_csv.read_csv(self.partial), converted)
            converted.replace(self.path)
            self.partial.unlink()
        else:
            self.partial.replace(self.path)


def adapt_batch(
    adapter: Adapter,
    batch: Batch,
    inputs: Inputs,
    out: PredictionFile,
    summary: Summary,
    classes: tuple[str, ...] | None = None,
) -> None:
    """Predict and adapt to one batch, write its rows and take note."""
    summary.unreadable += [(inputs.names[p], reason) for p, reason in batch.unreadable]
    if batch.images is None:
        return
    anchor = adapter.anchor
    logits = adapter(batch.images.to(anchor.device, anchor.dtype)).float()
    confidences, labels = (values.tolist() for values in logits.softmax(1).max(1))
    names = [inputs.names[p] for p in batch.positions]
    known = [str(label) if classes is None else classes[label] for label in labels]
    out.write(zip(names, labels, known, [f"{c:.6f}" for c in confidences], strict=True))
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
