"""Runs or batches as a flat table for other programs: CSV or Parquet."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ttvd.bench.spec import Run
from ttvd.bench.store.codec import BINS, SUMS
from ttvd.bench.store.listing import KnownRun
from ttvd.bench.store.reader import Reader
from ttvd.files import open_atomic

_AT_ONCE = 100  # runs whose batches are in memory together

SPEC = {
    "method": "text", "revision": "whole", "parameters": "json", "checkpoint": "text", "weights": "text",
    "data": "text", "content": "text", "domain": "text", "domains": "json", "constants": "text",
    "stream": "text", "options": "json", "join": "text", "batch_size": "whole", "limit": "whole",
    "views": "whole", "sites": "real", "selection": "text", "steps": "whole", "episodic": "flag",
    "precision": "text", "seed": "whole",
}  # fmt: skip
METRICS = {"n": "whole", "error": "real", "nll": "real", "brier": "real", "ece": "real", "batch_ece": "real"}
FACTS = {
    "order": "text", "device": "text", "threads": "whole", "versions": "json", "started": "real", "seconds": "real",
    "peak": "whole", "forwards": "real", "backwards": "real",
}  # fmt: skip
RUN_COLUMNS = (
    {"key": "text", "status": "text", "recipe": "text", "label": "text"}
    | SPEC
    | METRICS
    | {"kept": "real", "batches": "whole"}
    | FACTS
)
BATCH_COLUMNS = (
    dict.fromkeys(("key", "method", "data", "domain"), "text")
    | dict.fromkeys(("seed", "number", "n", "correct"), "whole")
    | dict.fromkeys((*SUMS, "kept", "seconds"), "real")
    | dict.fromkeys(BINS, "list")
)


def check_target(path: Path) -> None:
    """Refuse what cannot be written before any work is done."""
    if path.suffix not in (".csv", ".parquet"):
        raise ValueError(f"exports go to a .csv or .parquet file, got {path.name}")


def export_runs(entries: Iterable[KnownRun], path: Path) -> int:
    """One line for each run; numbers are empty where it is not done. Returns the number of lines."""
    return _write(path, RUN_COLUMNS, [[_flatten(entry) for entry in entries]])


def export_batches(store: Reader, entries: Sequence[KnownRun], path: Path) -> int:
    """One line for each batch of the runs that are done. Returns the number of lines."""
    return _write(path, BATCH_COLUMNS, _read_batches(store, [entry.key for entry in entries]))


def _flatten(entry: KnownRun) -> dict[str, Any]:
    line: dict[str, Any] = {"key": entry.key, "status": entry.status, "label": entry.label}
    line["recipe"] = ", ".join(dict.fromkeys(recipe for recipe, _ in entry.asked))
    line |= entry.spec.document() | {"domain": entry.spec.domain_label}
    if (run := entry.summary) is not None:
        line |= run.metrics | {"kept": run.kept, "batches": run.batches} | vars(run.facts)
    return line


def _read_batches(store: Reader, keys: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    for first in range(0, len(keys), _AT_ONCE):
        runs = store.load(keys[first : first + _AT_ONCE])
        yield [line for key, run in runs.items() for line in _flatten_rows(key, run)]


def _flatten_rows(key: str, run: Run) -> Iterator[dict[str, Any]]:
    spec = run.spec
    line = {"key": key, "method": spec.method, "data": spec.data, "seed": spec.seed}
    for number, row in enumerate(run.record.rows):
        domain = spec.domain_label if spec.join == "mixed" else spec.domains[row.domain].label
        yield (
            line
            | {"domain": domain, "number": number, "kept": row.kept, "seconds": row.seconds}
            | row.metrics
        )


def _write(path: Path, columns: Mapping[str, str], chunks: Iterable[list[dict[str, Any]]]) -> int:
    check_target(path)
    lines = (
        [[_plain(line.get(name), kind) for name, kind in columns.items()] for line in chunk]
        for chunk in chunks
    )
    return (_write_csv if path.suffix == ".csv" else _write_parquet)(path, columns, lines)


def _plain(value: Any, kind: str) -> Any:
    return json.dumps(value, sort_keys=True) if kind == "json" and value is not None else value


def _write_csv(path: Path, columns: Mapping[str, str], chunks: Iterable[list[list[Any]]]) -> int:
    count = 0
    with open_atomic(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text)
        writer.writerow(columns)
        for chunk in chunks:
            writer.writerows(
                [json.dumps(value) if isinstance(value, list) else value for value in line] for line in chunk
            )
            count += len(chunk)
        text.detach()
    return count


def _write_parquet(path: Path, columns: Mapping[str, str], chunks: Iterable[list[list[Any]]]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {"text": pa.string(), "json": pa.string(), "whole": pa.int64(), "real": pa.float64()}
    kinds |= {"flag": pa.bool_(), "list": pa.list_(pa.float64())}
    schema = pa.schema([(name, kinds[kind]) for name, kind in columns.items()])
    count = 0
    with open_atomic(path) as file, pq.ParquetWriter(file, schema) as writer:
        for chunk in chunks:
            arrays = [
                pa.array([line[at] for line in chunk], type=field.type) for at, field in enumerate(schema)
            ]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            count += len(chunk)
    return count
