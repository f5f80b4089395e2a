"""Invented runs, to be stored and packed."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ttvd.bench import Record, Row
from ttvd.bench.spec import Domain, Facts, Run, Spec

FACTS = Facts(
    order="5f3a", device="cpu", threads=1, versions={"ttvd": "0.1.0"}, started=1.7e9, seconds=12.25, peak=None,
    forwards=4.0, backwards=0.5,
)  # fmt: skip


def make_row(correct: int = 3, *, n: int = 4, bins: int = 15, kept: float = 0.5, domain: int = 0) -> Row:
    """A batch whose predictions are all equally sure."""
    empty = [0.0] * (bins - 1)
    metrics: dict[str, float | list[float]] = {"n": n, "correct": correct, "nll_sum": 0.1 * n}
    metrics |= {"brier_sum": 0.7, "batch_ece_sum": 1 / 3, "bin_count": [*empty, float(n)]}
    metrics |= {"bin_confidence": [*empty, 0.95 * n], "bin_correct": [*empty, float(correct)]}
    return Row(metrics, kept, 0.01, domain)


def make_run(seed: int = 0, *, method: str = "tent", rows: tuple[Row, ...] | None = None) -> Run:
    spec = Spec("digits-sla", "0" * 16, "digits", "1" * 16, (Domain("fog"),), method, seed=seed)
    spec = replace(spec, parameters={"lr": 1e-3, "statistics": "batch"})
    return Run(spec, Record(rows or tuple(make_row(number % 5) for number in range(3))), FACTS)


def make_long_run(seed: int = 0, batches: int = 20) -> Run:
    """A run whose numbers differ from batch to batch and from seed to seed; the first of each is seed + 1/2."""
    rows = []
    for number in range(batches):
        row = make_row(bins=15)
        confidence = [seed + 0.5] + [number / 8] * 14
        rows.append(replace(row, metrics={**row.metrics, "bin_confidence": confidence}))
    return make_run(seed, rows=tuple(rows))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder in memory where there is one: stores wait for the disk, which is most of their time."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)
