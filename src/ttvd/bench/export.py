"""All runs that a store knows of, listed and filtered, and written as flat tables for other programs."""

import csv
import difflib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ttvd.bench.encoding import BINS, SUMS
from ttvd.bench.spec import Run, Spec
from ttvd.bench.store import Failure, Reader, Summary
from ttvd.files import escape_cell, open_atomic

Status = Literal["done", "failed", "running", "missing"]
STATUSES: tuple[Status, ...] = get_args(Status)
_RUNS_AT_ONCE = 100  # runs whose batches are in memory together

SPEC_COLUMNS = {
    "method": "text", "revision": "whole", "parameters": "json", "checkpoint": "text", "weights": "text",
    "data": "text", "content": "text", "domain": "text", "domains": "json", "constants": "text",
    "stream": "text", "options": "json", "join": "text", "batch_size": "whole", "limit": "whole",
    "views": "whole", "sites": "real", "selection": "text", "steps": "whole", "episodic": "flag",
    "precision": "text", "seed": "whole",
}  # fmt: skip
FACT_COLUMNS = {
    "order": "text", "device": "text", "threads": "whole", "versions": "json", "started": "real", "seconds": "real",
    "peak": "whole", "forwards": "real", "backwards": "real",
}  # fmt: skip
RUN_COLUMNS = (
    dict.fromkeys(("key", "status", "recipe", "label"), "text")
    | SPEC_COLUMNS
    | {"n": "whole"}
    | dict.fromkeys(("error", "nll", "brier", "ece", "batch_ece"), "real")
    | {"kept": "real", "batches": "whole"}
    | FACT_COLUMNS
)
BATCH_COLUMNS = (
    dict.fromkeys(("key", "method", "data", "domain"), "text")
    | dict.fromkeys(("seed", "number", "n", "correct"), "whole")
    | dict.fromkeys((*SUMS, "kept", "seconds"), "real")
    | dict.fromkeys(BINS, "list")
)


@dataclass(frozen=True)
class ListedRun:
    """A run that a store knows of.

    Attributes:
        key: Key of the spec.
        spec: The run.
        status: State of the run; ``"running"`` means that a living process has claimed it.
        asked: Recipes that ask for the run, and the label that each gives it.
        summary: Summary of a run that is done.
        failure: Last failure of a run that is not done.
    """

    key: str
    spec: Spec
    status: Status
    asked: tuple[tuple[str, str], ...] = ()
    summary: Summary | None = None
    failure: Failure | None = None

    @property
    def label(self) -> str:
        """All labels of the run, as one text."""
        return ", ".join(dict.fromkeys(label for _, label in self.asked))

    def document(self) -> dict[str, Any]:
        """Return the run as plain JSON values."""
        asked = [{"recipe": recipe, "label": label} for recipe, label in self.asked]
        document: dict[str, Any] = {"key": self.key, "status": self.status, "asked": asked}
        document["spec"] = self.spec.document()
        if (run := self.summary) is not None:
            kept = run.kept if run.kept == run.kept else None  # JSON has no NaN
            document |= {"metrics": run.metrics, "batches": run.batches, "kept": kept}
            document |= {"facts": asdict(run.facts)}
        if self.failure is not None:
            document |= {"failure": {"text": self.failure.text, "when": self.failure.when or None}}
        return document


def list_runs(store: Reader) -> list[ListedRun]:
    """List the finished runs in the order in which they were added, then the others in the order of their recipes."""
    done = {summary.key: summary for summary in store.summaries()}
    failures = {failure.key: failure for failure in store.failures() if failure.key not in done}
    claimed = store.claimed()
    specs = {key: summary.spec for key, summary in done.items()}
    asked: dict[str, dict[tuple[str, str], None]] = {}
    for member in (member for recipe in store.recipes() for member in store.members(recipe)):
        specs[member.spec.key] = member.spec
        asked.setdefault(member.spec.key, {})[member.recipe, member.label] = None
    specs |= {key: failure.spec for key, failure in failures.items()}

    def find_status(key: str) -> Status:
        if key in done:
            return "done"
        if key in claimed:
            return "running"
        return "failed" if key in failures else "missing"

    return [
        ListedRun(key, spec, find_status(key), tuple(asked.get(key, ())), done.get(key), failures.get(key))
        for key, spec in specs.items()
    ]


def select_runs(
    runs: Sequence[ListedRun],
    *,
    key: str | None = None,
    method: str | None = None,
    domain: str | None = None,
    recipe: str | None = None,
    seed: int | None = None,
    status: str | None = None,
) -> list[ListedRun]:
    """Return the runs that match all filters which are given.

    Raises:
        ValueError: No run in the list has this method, domain or recipe; or there is no such status.
    """
    words = None if domain is None else domain.replace("_", " ").lower()
    _check_value("method", method, (run.spec.method for run in runs))
    _check_value("domain", words, (name for run in runs for name in _domain_names(run.spec)))
    _check_value("recipe", recipe, (name for run in runs for name, _ in run.asked))
    _check_value("status", status, STATUSES)
    return [
        run
        for run in runs
        if key in (None, run.key)
        and method in (None, run.spec.method)
        and words in (None, *_domain_names(run.spec))
        and recipe in (None, *(name for name, _ in run.asked))
        and seed in (None, run.spec.seed)
        and status in (None, run.status)
    ]


def _domain_names(spec: Spec) -> tuple[str, str]:
    """Return what a domain may be called: "fog 5", or "fog" for every severity; "continual (15)", or "continual"."""
    main = spec.main_domain
    return spec.domain_label, spec.join if main is None else main.corruption.replace("_", " ")


def _check_value(what: str, value: str | None, known: Iterable[str]) -> None:
    names = sorted(set(known))
    if value is not None and value not in names:
        near = difflib.get_close_matches(value, names, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names) or 'none'}"
        raise ValueError(f"no run has the {what} {value!r}; {hint}")


def check_target(path: Path) -> None:
    """Refuse a file that exports cannot go to, before any work is done.

    Raises:
        ValueError: The name ends neither in .csv nor in .parquet.
    """
    if path.suffix not in (".csv", ".parquet"):
        raise ValueError(f"exports go to a .csv or .parquet file, got {path.name}")


def export_runs(runs: Iterable[ListedRun], path: Path) -> int:
    """Write one line for each run; its numbers are empty where it is not done. Returns the number of lines."""
    return _write(path, RUN_COLUMNS, [[_flatten(run) for run in runs]])


def export_batches(store: Reader, runs: Sequence[ListedRun], path: Path) -> int:
    """Write one line for each batch of the runs that are done. Returns the number of lines."""
    return _write(path, BATCH_COLUMNS, _read_batches(store, [run.key for run in runs]))


def _flatten(run: ListedRun) -> dict[str, Any]:
    line: dict[str, Any] = {"key": run.key, "status": run.status, "label": run.label}
    line["recipe"] = ", ".join(dict.fromkeys(recipe for recipe, _ in run.asked))
    line |= run.spec.document() | {"domain": run.spec.domain_label}
    if (found := run.summary) is not None:
        line |= found.metrics | {"kept": found.kept, "batches": found.batches} | vars(found.facts)
    return line


def _read_batches(store: Reader, keys: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    for first in range(0, len(keys), _RUNS_AT_ONCE):
        runs = store.load(keys[first : first + _RUNS_AT_ONCE])
        yield [line for key, run in runs.items() for line in _flatten_batches(key, run)]


def _flatten_batches(key: str, run: Run) -> Iterator[dict[str, Any]]:
    spec = run.spec
    line = {"key": key, "method": spec.method, "data": spec.data, "seed": spec.seed}
    for number, row in enumerate(run.record.rows):
        domain = spec.domain_label if spec.join == "mixed" else spec.domains[row.domain].label
        numbers = {"domain": domain, "number": number, "kept": row.kept, "seconds": row.seconds}
        yield line | numbers | row.metrics


def _write(path: Path, columns: Mapping[str, str], chunks: Iterable[list[dict[str, Any]]]) -> int:
    def to_cell(value: Any, kind: str) -> Any:
        if kind == "text" and value is not None and path.suffix == ".csv":
            return escape_cell(value)
        return json.dumps(value, sort_keys=True) if kind == "json" and value is not None else value

    check_target(path)
    lines = (
        [[to_cell(line.get(name), kind) for name, kind in columns.items()] for line in chunk]
        for chunk in chunks
    )
    return (_write_csv if path.suffix == ".csv" else _write_parquet)(path, columns, lines)


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
