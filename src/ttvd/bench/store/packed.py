"""A finished run as one line of a CSV file, and back: sums instead of batches, so that thousands of runs stay small.

What is kept: the spec, the facts, the sums of the whole stream and of each of its domains, and how many samples each
batch had and how many of them were right. Error, NLL, Brier score, ECE, batch ECE and the share kept come out as from
all batches, digit by digit; curves and paired comparisons too. What is lost are NLL, bins, share and time of single
batches.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ttvd.bench.run import Record, Row, sum_metrics
from ttvd.bench.spec import Facts, Run, Spec
from ttvd.bench.store.codec import BINS, SUMS, to_json
from ttvd.bench.store.export import FACTS, SPEC
from ttvd.metrics import RunningMetrics

State = dict[str, float | list[float]]

_MOST_BATCHES = 10_000_000  # a few letters must not fill the memory

# Numbers of a spec as JSON: 1 and 1.0 are different keys.
_SPEC = {name: "json" if kind == "real" else kind for name, kind in SPEC.items() if name != "domain"}
_SCORES: dict[str, str] = (
    dict.fromkeys(("n", "correct"), "whole")
    | dict.fromkeys((*SUMS, "kept"), "real")
    | dict.fromkeys(BINS, "numbers")
    | {"parts": "json", "sizes": "counts", "right": "counts", "batch_seconds": "real"}
)
COLUMNS: dict[str, str] = (
    {"key": "text", "status": "text", "recipe": "text", "members": "whole", "asked": "json"}
    | _SPEC
    | _SCORES
    | FACTS
    | {"digest": "text"}
)
"""Names and kinds. ``recipe`` is a digest of what the recipe asks for, ``members`` the number of its runs; ``asked``
says for which of them the run serves (place, label, role, varied parameters, condition); ``parts`` has the sums of each
domain where there are several; ``sizes`` and ``right`` are samples and correct ones of each batch, 64x156 for 64 that
come 156 times."""


@dataclass(frozen=True)
class PackedRecord(Record):
    """A record whose batches were summed; ``rows`` has one for each domain.

    Attributes:
        whole: Sums of the stream, as ``RunningMetrics.state`` gives them.
        batches: Samples of each batch.
        right: Correct ones among them; None where they were left out.
        share: Share of all samples that were used to adapt.
        pace: Median seconds of a batch.
    """

    whole: State
    batches: tuple[int, ...]
    right: tuple[int, ...] | None
    share: float
    pace: float

    def metrics(self) -> RunningMetrics:
        """The metrics of the whole stream."""
        return RunningMetrics.from_state(self.whole)

    def sizes(self) -> Tensor:
        """Samples in each batch, float64."""
        return torch.tensor(self.batches, dtype=torch.float64)

    def wrong(self) -> Tensor:
        """Wrong predictions in each batch, float64."""
        if self.right is None:
            raise ValueError("the counts of single batches are not kept of runs that only choose a setting")
        return self.sizes() - torch.tensor(self.right, dtype=torch.float64)

    def kept(self) -> float:
        """Share of all samples that were used to adapt."""
        return self.share

    def seconds_per_batch(self) -> float:
        """Median time of a batch."""
        return self.pace


def has_batches(run: Run) -> bool:
    """Whether the record says how each batch went; where runs were packed, it may only know sums.

    Example:
        >>> spec = Spec("m", "", "digits", "", (), "bn", batch_size=2)
        >>> state = {"n": 8, "correct": 4}
        >>> has_batches(Run(spec, Record((Row(state, 1.0, 0.1),)), None))
        False
    """
    if isinstance(run.record, PackedRecord):
        return run.record.right is not None
    return all(row.metrics["n"] <= run.spec.batch_size for row in run.record.rows)  # type: ignore[operator]


def pack_run(run: Run, *, batches: bool) -> dict[str, str]:
    """The cells of a run, by name.

    Args:
        run: Finished; one that was packed before gives the same cells again.
        batches: Whether to keep the counts of single batches.
    """
    record = run.record
    rows = sorted({row.domain for row in record.rows})
    parts = [
        _pack_part(number, [row for row in record.rows if row.domain == number])
        for number in (rows if rows != [0] else [])
    ]
    sizes = [int(size) for size in record.sizes().tolist()]
    counted = batches and has_batches(run)
    right = (
        [int(size - wrong) for size, wrong in zip(sizes, record.wrong(), strict=True)] if counted else None
    )
    values: dict[str, Any] = record.metrics().state() | {"kept": record.kept(), "parts": parts or None}
    values |= {"sizes": sizes, "right": right, "batch_seconds": record.seconds_per_batch()}
    values |= {item.name: getattr(run.facts, item.name) for item in fields(Facts)}
    kinds = _SCORES | FACTS
    return (
        {"key": run.spec.key}
        | pack_spec(run.spec)
        | {name: _write(values[name], kinds[name]) for name in kinds}
    )


def pack_spec(spec: Spec) -> dict[str, str]:
    """The cells of a spec, by name."""
    document = spec.document()
    return {name: _write(document[name], kind) for name, kind in _SPEC.items()}


def unpack_spec(cells: Mapping[str, str]) -> Spec:
    """The spec that :func:`pack_spec` was given."""
    return Spec.from_document({name: _read(cells[name], kind) for name, kind in _SPEC.items()})


def unpack_run(spec: Spec, cells: Mapping[str, str]) -> Run:
    """The run that :func:`pack_run` was given, with sums for batches.

    Raises:
        ValueError: The cells contradict each other.
    """
    values = {name: _read(cells[name], kind) for name, kind in (_SCORES | FACTS).items()}
    whole: State = {name: values[name] for name in ("n", "correct", *SUMS, *BINS)}
    if RunningMetrics.from_state(whole).compute()["n"] != sum(values["sizes"]):
        raise ValueError("the sizes of its batches do not sum up to n")
    if values["right"] is not None and sum(values["right"]) != whole["correct"]:
        raise ValueError("the correct predictions of its batches do not sum up to correct")
    sizes, right = tuple(values["sizes"]), values["right"]
    pace = values["batch_seconds"] / float(torch.tensor(sizes).median())
    rows = [_unpack_part(part, pace) for part in values["parts"] or ()]
    rows = rows or [Row(whole, values["kept"], pace * values["n"])]
    if sum_metrics(rows).compute()["error"] != RunningMetrics.from_state(whole).compute()["error"]:
        raise ValueError("the sums of its domains are not those of the stream")
    record = PackedRecord(
        tuple(rows),
        whole,
        sizes,
        None if right is None else tuple(right),
        values["kept"],
        values["batch_seconds"],
    )
    return Run(spec, record, Facts(**{item.name: values[item.name] for item in fields(Facts)}))


def seal(cells: Mapping[str, str]) -> str:
    """The digest of a line: of all its other cells."""
    text = json.dumps([cells[name] for name in COLUMNS if name != "digest"])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _pack_part(number: int, rows: Sequence[Row]) -> list[Any]:
    """Domain, share kept (as text: it need not be a number) and sums, those of the table."""
    sums = sum_metrics(rows).state()
    kept = rows[0].kept if len(rows) == 1 else Record(tuple(rows)).kept()
    return [number, repr(kept), *(sums[name] for name in ("n", "correct", *SUMS, *BINS))]


def _unpack_part(part: Sequence[Any], pace: float) -> Row:
    number, kept, *sums = part
    state: State = dict(zip(("n", "correct", *SUMS, *BINS), sums, strict=True))
    return Row(state, float(kept), pace * sums[0], number)


def _write(value: Any, kind: str) -> str:
    """A cell; :func:`_read` gives the value back."""
    if value is None:
        return ""
    if kind == "json":
        return to_json(value)
    if kind == "counts":
        groups = [(size, len(list(group))) for size, group in groupby(value)]
        return " ".join(str(size) if times == 1 else f"{size}x{times}" for size, times in groups)
    if kind == "numbers":
        return " ".join(_show(number) for number in value)
    return _show(value) if kind == "real" else str(value)


def _show(number: float) -> str:
    """The shortest text that is read as the same number; whole ones without a point."""
    return (
        str(int(number))
        if number == number and abs(number) < 2**53 and number == int(number)
        else repr(number)
    )


def _read(text: str, kind: str) -> Any:
    if kind == "text":
        return text
    if not text:
        return None
    if kind == "flag":
        return {"True": True, "False": False}[text]
    if kind == "counts":
        pairs = [
            (int(size), int(times or 1)) for size, _, times in (word.partition("x") for word in text.split())
        ]
        if sum(times for _, times in pairs) > _MOST_BATCHES:
            raise ValueError(f"more than {_MOST_BATCHES:,} batches")
        return [size for size, times in pairs for _ in range(times)]
    readers: dict[str, Any] = {"json": json.loads, "whole": int, "real": float}
    return [float(word) for word in text.split()] if kind == "numbers" else readers[kind](text)
