"""Runs as rows of tables, and back without a loss.

Numbers are kept as SQLite keeps them: float64 as it is, but NaN as NULL, and minus zero as zero.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttvd.bench.run import Record, Row
from ttvd.bench.spec import Facts, Run, Spec
from ttvd.metrics import RunningMetrics

SUMS = ("nll_sum", "brier_sum", "batch_ece_sum")
BINS = ("bin_count", "bin_confidence", "bin_correct")
NUMBERS = ("number", "domain", "n", "correct", *SUMS, "kept", "seconds")
COLUMNS = (*NUMBERS, "bins")
"""Of the table ``batches``, without the key of the run."""


def to_json(value: Any) -> str:
    """JSON that other programs can read too: no NaN."""
    return json.dumps(value, sort_keys=True, allow_nan=False)


def spec_from_json(text: str) -> Spec:
    """The spec that was written with :func:`to_json`."""
    return Spec.from_document(json.loads(text))


@dataclass(frozen=True)
class Line:
    """One line of the table ``runs``, as far as it is needed to read the run."""

    key: str
    spec: str
    facts: str
    bins: int
    digest: str = ""


def encode(run: Run) -> tuple[Line, list[tuple[Any, ...]]]:
    """A run as a line of ``runs`` and lines of ``batches`` (in the order of ``COLUMNS``).

    Raises:
        ValueError: The record holds what could not be read back as a run.
    """
    bins = _check_rows(run)
    lines = [
        (number, row.domain, *(row.metrics[name] for name in ("n", "correct", *SUMS)), row.kept, row.seconds)
        for number, row in enumerate(run.record.rows)
    ]
    blobs = np.array([[row.metrics[name] for name in BINS] for row in run.record.rows], dtype="<f8")
    line = Line(run.spec.key, to_json(run.spec.document()), to_json(asdict(run.facts)), bins)
    line = replace(line, digest=_digest(line, _numbers(lines), blobs.tobytes()))
    return line, [(*numbers, blob.tobytes()) for numbers, blob in zip(lines, blobs, strict=True)]


def _check_rows(run: Run) -> int:
    """The number of bins, the same in all rows."""
    rows = run.record.rows
    if not rows:
        raise ValueError("a run without batches cannot be stored")
    for number, row in enumerate(rows):
        RunningMetrics.from_state(row.metrics)
        if not 0 <= row.domain < len(run.spec.domains):
            raise ValueError(
                f"batch {number} has domain {row.domain}, the spec has {len(run.spec.domains)} domains"
            )
    sizes = {len(row.metrics[name]) for row in rows for name in BINS}  # type: ignore[arg-type]
    if len(sizes) != 1:
        raise ValueError(f"all batches of a run have the same confidence bins, got {sorted(sizes)}")
    return sizes.pop()


class Block:
    """The batches of a run as they come out of the database: arrays for all of them, checked against the digest.

    Args:
        line: Of the run.
        batches: Its lines of ``batches``, in order; columns after ``COLUMNS`` do not matter.

    Raises:
        ValueError: They are not those that were stored.
    """

    def __init__(self, line: Line, batches: Sequence[tuple[Any, ...]]) -> None:
        content = b"".join(batch[len(NUMBERS)] for batch in batches)
        self.line, self._batches = line, batches
        self.numbers = _numbers([batch[: len(NUMBERS)] for batch in batches])
        if _digest(line, self.numbers, content) != line.digest:
            raise ValueError("its content does not match its digest")
        self.bins = np.frombuffer(content, dtype="<f8").reshape(len(batches), len(BINS), line.bins)

    @property
    def spec(self) -> Spec:
        """What was asked."""
        return spec_from_json(self.line.spec)

    @property
    def facts(self) -> Facts:
        """The circumstances."""
        return Facts(**json.loads(self.line.facts))

    def run(self) -> Run:
        """The run that was stored."""
        # Lists for all rows at once: one conversion instead of one for each row and name.
        floats, bins = self.numbers[:, 4:].tolist(), self.bins.tolist()
        rows = [
            Row(
                {
                    "n": batch[2],
                    "correct": batch[3],
                    "nll_sum": nll,
                    "brier_sum": brier,
                    "batch_ece_sum": ece,
                    "bin_count": count,
                    "bin_confidence": confidence,
                    "bin_correct": correct,
                },
                kept,
                seconds,
                batch[1],
            )
            for batch, (nll, brier, ece, kept, seconds), (count, confidence, correct) in zip(
                self._batches, floats, bins, strict=True
            )
        ]
        return Run(self.spec, Record(tuple(rows)), self.facts)

    def metrics(self) -> dict[str, float]:
        """Totals, as ``run().record.metrics().compute()`` gives them, without making rows."""
        counts = dict(
            zip(("n", "correct"), self.numbers[:, 2:4].sum(axis=0).astype(int).tolist(), strict=True)
        )
        sums = [np.ascontiguousarray(column).sum() for column in self.numbers[:, 4:7].T]
        lists = dict(zip((*SUMS, *BINS), (*sums, *self.bins.sum(axis=0).tolist()), strict=True))
        return RunningMetrics.from_state(counts | lists).compute()

    def kept(self) -> float:
        """Share of all samples that were used to adapt."""
        sizes = self.numbers[:, 2]
        return float((sizes * self.numbers[:, 7]).sum() / sizes.sum())


def _numbers(lines: Iterable[Sequence[Any]]) -> NDArray[np.float64]:
    """All columns but the bins, as the database gives them back: NULL is NaN, and there is one NaN and one zero."""
    numbers = np.array(list(lines), dtype="<f8") + 0.0
    numbers[np.isnan(numbers)] = np.nan
    return numbers


def _digest(line: Line, numbers: NDArray[np.float64], bins: bytes) -> str:
    """Of all that is stored, so that damage which SQLite cannot see is noticed."""
    head = json.dumps([line.key, line.spec, line.facts, line.bins, len(numbers)])
    hashed = hashlib.sha256(head.encode())
    hashed.update(numbers.tobytes())
    hashed.update(bins)
    return hashed.hexdigest()
