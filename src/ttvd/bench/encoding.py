"""Runs as rows of the database, and back without a loss.

SQLite keeps numbers as float64, but NaN as NULL, and minus zero as zero.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ttvd.bench.run import Record, Row
from ttvd.bench.spec import Facts, Run, Spec
from ttvd.metrics import RunningMetrics

SUMS = ("nll_sum", "brier_sum", "batch_ece_sum")
BINS = ("bin_count", "bin_confidence", "bin_correct")
BATCH_NUMBERS = ("number", "domain", "n", "correct", *SUMS, "kept", "seconds")
BATCH_COLUMNS = (*BATCH_NUMBERS, "bins")
"""Columns of the table ``batches``, without the key of the run."""


def to_json(value: Any) -> str:
    """Write JSON that other programs can read too: without NaN."""
    return json.dumps(value, sort_keys=True, allow_nan=False)


def spec_from_json(text: str) -> Spec:
    """Read a spec that was written with :func:`to_json`."""
    return Spec.from_document(json.loads(text))


class Header(NamedTuple):
    """The row of a run in the table ``runs``, without the columns that only serve to filter."""

    key: str
    spec: str
    facts: str
    bins: int
    digest: str


def encode_run(run: Run) -> tuple[Header, list[tuple[Any, ...]]]:
    """Encode a run as a row of ``runs`` and rows of ``batches`` (in the order of ``BATCH_COLUMNS``).

    Raises:
        ValueError: The record holds what could not be read back as a run.
    """
    size = _check_record(run)
    rows = [
        (number, row.domain, *(row.metrics[name] for name in ("n", "correct", *SUMS)), row.kept, row.seconds)
        for number, row in enumerate(run.record.rows)
    ]
    bins = np.array([[row.metrics[name] for name in BINS] for row in run.record.rows], dtype="<f8")
    texts = run.spec.key, to_json(run.spec.document()), to_json(asdict(run.facts))
    header = Header(*texts, size, _compute_digest((*texts, size), _to_array(rows), bins.tobytes()))
    return header, [(*numbers, block.tobytes()) for numbers, block in zip(rows, bins, strict=True)]


def _check_record(run: Run) -> int:
    """Return the number of confidence bins, which all rows share."""
    rows = run.record.rows
    if not rows:
        raise ValueError("a run without batches cannot be stored")
    if not -(2**63) <= run.spec.seed < 2**63:
        raise ValueError(f"a store holds seeds up to {2**63 - 1}, got {run.spec.seed}")
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


class StoredRun:
    """A run as the database holds it, as arrays over its batches.

    Args:
        header: Row of the run in ``runs``.
        batches: Rows of the run in ``batches``, in order. Columns after ``BATCH_COLUMNS`` are ignored.

    Raises:
        ValueError: The rows do not match the digest: they are not those that were stored.
    """

    def __init__(self, header: Header, batches: Sequence[tuple[Any, ...]]) -> None:
        bins = b"".join(batch[len(BATCH_NUMBERS)] for batch in batches)
        self.header, self._batches = header, batches
        self.numbers = _to_array(batch[: len(BATCH_NUMBERS)] for batch in batches)
        if _compute_digest(header[:-1], self.numbers, bins) != header.digest:
            raise ValueError("its content does not match its digest")
        self.bins = np.frombuffer(bins, dtype="<f8").reshape(len(batches), len(BINS), header.bins)

    @cached_property
    def spec(self) -> Spec:
        """The spec of the run."""
        return spec_from_json(self.header.spec)

    @cached_property
    def facts(self) -> Facts:
        """The circumstances of the run."""
        return Facts(**json.loads(self.header.facts))

    def run(self) -> Run:
        """Return the run that was stored."""
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
        """Return ``run().record.metrics().compute()`` without making rows."""
        n, correct = self.numbers[:, 2:4].sum(axis=0).astype(int).tolist()
        sums = [np.ascontiguousarray(column).sum() for column in self.numbers[:, 4:7].T]
        state = dict(zip((*SUMS, *BINS), (*sums, *self.bins.sum(axis=0).tolist()), strict=True))
        return RunningMetrics.from_state({"n": n, "correct": correct} | state).compute()

    def kept(self) -> float:
        """Return the share of all samples that were used to adapt."""
        sizes = self.numbers[:, 2]
        return float((sizes * self.numbers[:, 7]).sum() / sizes.sum())


def _to_array(rows: Iterable[Sequence[Any]]) -> NDArray[np.float64]:
    """Return all columns but the bins, as the database gives them back: NULL is NaN, and there is only one zero."""
    numbers = np.array(list(rows), dtype="<f8") + 0.0
    numbers[np.isnan(numbers)] = np.nan
    return numbers


def _compute_digest(header: Sequence[Any], numbers: NDArray[np.float64], bins: bytes) -> str:
    """Return a digest of all that is stored, which shows damage that SQLite cannot see."""
    hashed = hashlib.sha256(json.dumps([*header, len(numbers)]).encode())
    hashed.update(numbers.tobytes())
    hashed.update(bins)
    return hashed.hexdigest()
