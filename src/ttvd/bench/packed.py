"""Packed runs: the finished runs of a recipe in a CSV file that can be committed, with the recipe beside it.

A run is one line. It keeps the spec, the facts, the sums of the whole stream and of each of its domains, and how many
samples each batch had and how many of them were right. Error, NLL, Brier score, ECE, batch ECE and the share kept come
out as from all batches, digit by digit; so do curves and paired comparisons. NLL, bins, share and time of single
batches are lost.
"""

import csv
import hashlib
import io
import json
import tempfile
import threading
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ttvd.bench.encoding import BINS, SUMS, to_json
from ttvd.bench.export import FACT_COLUMNS, SPEC_COLUMNS
from ttvd.bench.run import Record, Row, sum_metrics
from ttvd.bench.spec import Facts, Member, Run, Spec
from ttvd.bench.store import Failure, Figure, Reader, Store, Summary, check_name, check_recipe, pick_key
from ttvd.files import open_atomic
from ttvd.metrics import RunningMetrics

State = dict[str, float | list[float]]

# Numbers of a spec are written as JSON, because 1 and 1.0 give different keys.
_SPEC = {name: "json" if kind == "real" else kind for name, kind in SPEC_COLUMNS.items() if name != "domain"}
_STATE = ("n", "correct", *SUMS, *BINS)
_SCORES: dict[str, str] = (
    dict.fromkeys(("n", "correct"), "whole")
    | dict.fromkeys((*SUMS, "kept"), "real")
    | dict.fromkeys(BINS, "numbers")
    | {"parts": "json", "sizes": "sizes", "right": "counts", "batch_seconds": "real"}
)
COLUMNS: dict[str, str] = (
    {"key": "text", "status": "text", "recipe": "text", "members": "whole", "asked": "json"}
    | _SPEC
    | _SCORES
    | FACT_COLUMNS
    | {"digest": "text"}
)
"""Names and kinds of the columns.

``recipe`` is a digest of what the recipe asks for, and ``members`` the number of its runs. ``asked`` says which of
them the line serves (place, label, role, varied parameters, condition). ``parts`` has the sums of each domain where
each of several is visited once. ``sizes`` and ``right`` are the samples and the correct ones of each batch; 64x156
stands for 156 times 64. Where domains come again, ``sizes`` has them too: 0:64x8 1:64x10 0:64x10.
"""
_MOST_BATCHES = 10_000_000  # a few letters must not fill the memory
_SQLITE = b"SQLite format 3\0"  # the first bytes of a store, whatever its file is called
_CSV_LIMIT = threading.Lock()  # the csv module has one limit for all threads
_RESTORE = (
    "take it from version control again, or delete it and pack the store again: ttvd runs STORE --pack FOLDER"
)
_NOT_WRITTEN = (
    "Nothing was written. Use another folder, or give --replace to keep only what this store asks for"
)


@dataclass(frozen=True)
class PackedRecord(Record):
    """A record whose batches were summed; ``rows`` has one row for each domain.

    Attributes:
        whole: Sums of the stream, as ``RunningMetrics.state`` gives them.
        batches: Samples of each batch.
        visited: Domain of each batch.
        right: Correct samples of each batch; None where they were left out.
        share: Share of all samples that were used to adapt.
        pace: Median seconds of a batch.
    """

    whole: State
    batches: tuple[int, ...]
    visited: tuple[int, ...]
    right: tuple[int, ...] | None
    share: float
    pace: float

    def metrics(self) -> RunningMetrics:
        """Return the metrics of the whole stream."""
        return RunningMetrics.from_state(self.whole)

    def sizes(self) -> Tensor:
        """Return the samples in each batch, float64."""
        return torch.tensor(self.batches, dtype=torch.float64)

    def domains(self) -> list[int]:
        """Return the number of the domain of each batch."""
        return list(self.visited)

    def wrong(self) -> Tensor:
        """Return the wrong predictions in each batch, float64."""
        if self.right is None:
            raise ValueError("the counts of single batches are not kept of runs that only choose a setting")
        return self.sizes() - torch.tensor(self.right, dtype=torch.float64)

    def kept(self) -> float:
        """Return the share of all samples that were used to adapt."""
        return self.share

    def seconds_per_batch(self) -> float:
        """Return the median time of a batch."""
        return self.pace


def has_batches(run: Run) -> bool:
    """Return whether the record says how each batch went. A record that was packed may know sums only.

    Example:
        >>> spec = Spec("m", "", "digits", "", (), "bn", batch_size=2)
        >>> state = {"n": 8, "correct": 4}
        >>> has_batches(Run(spec, Record((Row(state, 1.0, 0.1),)), None))
        False
    """
    if isinstance(run.record, PackedRecord):
        return run.record.right is not None
    return all(row.metrics["n"] <= run.spec.batch_size for row in run.record.rows)  # type: ignore[operator]


# Reading and writing files


class PackedRuns:
    """The packed runs of one recipe. Whatever reads a store can read them too.

    NAME.csv has a line for each run that the recipe asks for. NAME.toml beside it is the recipe. Every line has a
    digest of itself and of what the recipe asks for, and all lines together must be those of the recipe, so that damage
    does not go unnoticed. Nothing in the files can run code.

    Args:
        path: Path of the .csv file.

    Raises:
        ValueError: It is not such a file, or it is damaged; the message says where and what to do.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.name = path.stem
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        recipe = path.with_suffix(".toml")
        if not recipe.is_file():
            raise FileNotFoundError(f"packed runs need their recipe beside them: there is no {recipe}")
        try:
            self._text = recipe.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{recipe} is not a text file ({error}); {_RESTORE}") from error
        self._runs: dict[str, Run] = {}
        self._failed: dict[str, Spec] = {}
        members: list[tuple[int, Member]] = []
        totals: set[str] = set()
        for number, cells in _read_lines(path, _digest_recipe(self._text, self.name)):
            try:
                members += self._add_line(cells)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(f"line {number} of {path} is not a run of this version: {error}") from error
            totals.add(cells["members"])
        places = [place for place, _ in members]
        if totals != {str(len(places))} or sorted(places) != list(range(len(places))):
            raise ValueError(f"{path} does not have all lines of its recipe, each once; {_RESTORE}")
        self._members = [member for _, member in sorted(members, key=lambda pair: pair[0])]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def _add_line(self, cells: Mapping[str, str]) -> list[tuple[int, Member]]:
        """Keep the run of a line. Returns the members that it serves, with their places in the recipe."""
        spec = _unpack_spec(cells)
        if spec.key != cells["key"]:
            raise ValueError(f"the key of its spec is {spec.key}, not {cells['key']}")
        if cells["status"] == "done":
            self._runs[spec.key] = _unpack_run(spec, cells)
        elif cells["status"] == "failed":
            self._failed[spec.key] = spec
        elif cells["status"] != "missing":
            raise ValueError(f"its status is {cells['status']!r}")
        return [
            (place, Member(self.name, label, role, spec, varies, condition))
            for place, label, role, varies, condition in json.loads(cells["asked"])
        ]

    def recipes(self) -> dict[str, str]:
        """Return the name of the recipe and its TOML."""
        return {self.name: self._text}

    def members(self, recipe: str) -> list[Member]:
        """Return the runs that the recipe asks for, in its order."""
        check_recipe(recipe, [self.name], self.path)
        return list(self._members)

    def done(self) -> set[str]:
        """Return the keys of the finished runs."""
        return set(self._runs)

    def load(self, keys: Iterable[str]) -> dict[str, Run]:
        """Return finished runs. Keys that are not done are left out."""
        return {key: self._runs[key] for key in dict.fromkeys(keys) if key in self._runs}

    def summaries(self) -> list[Summary]:
        """Return all finished runs without their rows."""
        return [
            Summary(key, run.spec, run.totals, run.facts, len(run.record.sizes()), run.record.kept())
            for key, run in self._runs.items()
        ]

    def failures(self) -> list[Failure]:
        """Return the runs that failed. Only the store tells why and when, since tracebacks speak of the machine."""
        text = "It failed; the store that this file was made from has the traceback."
        return [Failure(key, spec, text, 0.0) for key, spec in self._failed.items()]

    def claimed(self) -> set[str]:
        """Return the empty set: nobody works on a file."""
        return set()

    def figures(self, recipe: str) -> list[Figure]:
        """Return an empty list: figures stay in the store, because they show images."""
        return []

    def find(self, prefix: str) -> str:
        """Return the key that begins with a prefix."""
        keys = {member.spec.key for member in self._members}
        return pick_key(sorted(key for key in keys if key.startswith(prefix.lower())), prefix, self.path)


def open_runs(path: Path) -> Store | PackedRuns:
    """Open a store, or packed runs (a .csv file), for reading."""
    if path.suffix == ".csv" and path.is_file():
        with path.open("rb") as file:
            if file.read(len(_SQLITE)) != _SQLITE:
                return PackedRuns(path)
    return Store(path, create=False, readonly=True)


def pack_runs(source: Reader, recipe: str, folder: Path, *, replace: bool = False) -> tuple[Path, int]:
    """Write the runs of a recipe to FOLDER/RECIPE.csv, and the recipe beside it.

    The runs of a recipe may come from several stores. The runs and failures of an existing file stay, and what the
    source asks for beyond it, e.g. other seeds, is added. The new file is read back before it replaces the old one.

    Args:
        source: A store, or packed runs.
        recipe: Name of the recipe there.
        folder: Folder of the file. It is made if it is not there.
        replace: Let the file ask for what the source asks for, and for nothing else. Of its old runs, those that the
            source asks for stay.

    Returns:
        The .csv file, and the number of finished runs in it.

    Raises:
        ValueError: There is no such recipe, its name is not a plain name, the existing file is damaged, or it holds
            runs that cannot stand beside those of the source (another recipe, a trial with another limit).
    """
    check_name(recipe)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"packed runs go to a folder, but {folder} is a file; give another name")
    members, text = source.members(recipe), source.recipes()[recipe]
    path = folder / f"{recipe}.csv"
    old = PackedRuns(path) if path.exists() else None
    if old is not None and not replace:
        _check_same_recipe(text, old.recipes()[recipe], path)
        members = _unite_members(members, old.members(recipe), path)
    asked: dict[str, list[tuple[int, Member]]] = {}
    for place, member in enumerate(members):
        asked.setdefault(member.spec.key, []).append((place, member))
    runs, failed = _collect_runs(source, old, asked)
    shared = {"recipe": _digest_recipe(text, recipe), "members": str(len(members))}
    lines = [_pack_line(group, runs.get(key), key in failed, shared) for key, group in asked.items()]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pack-", dir=folder) as scratch:
        draft = Path(scratch, path.name)
        with open_atomic(draft.with_suffix(".toml")) as file:
            file.write(text.encode())
        _write_lines(draft, lines)
        _check_draft(draft, path, members, runs)
        for end in (".toml", ".csv"):
            draft.with_suffix(end).replace(path.with_suffix(end))
    return path, len(runs)


def unpack_runs(packed: PackedRuns, store: Store) -> int:
    """Put packed runs and their recipe into a store, to go on from there. The store gets sums instead of batches.

    Returns:
        How many runs the store did not have.
    """
    store.save_recipe(packed.name, packed.recipes()[packed.name], packed.members(packed.name))
    return sum(store.add(run) for run in packed.load(sorted(packed.done())).values())


def _collect_runs(
    source: Reader, old: PackedRuns | None, keys: Iterable[str]
) -> tuple[dict[str, Run], set[str]]:
    """Return the finished runs of the source and the old file, and the keys of those that failed and are not done."""
    runs = source.load(keys)
    failed = {failure.key for failure in source.failures()}
    if old is not None:
        failed |= {failure.key for failure in old.failures()}
        for key, run in old.load(keys).items():
            if key not in runs or not has_batches(runs[key]):
                runs[key] = run
    return runs, failed - set(runs)


def _check_draft(draft: Path, path: Path, members: Sequence[Member], runs: Mapping[str, Run]) -> None:
    """Refuse a file that does not give back what was written."""
    refused = f"{path} was not written: the new file does not give back the runs"
    try:
        found = PackedRuns(draft)
    except (ValueError, OSError) as error:
        raise ValueError(f"{refused} ({error})") from error
    there = [_identify(member) for member in found.members(draft.stem)]
    if there != [_identify(member) for member in members] or found.done() != set(runs):
        raise ValueError(f"{refused} (it has others)")
    for key, run in found.load(runs).items():
        pairs = [(run.totals[name], value) for name, value in runs[key].totals.items()]
        # NaN may stay NaN.
        if any(now != before and (now == now or before == before) for now, before in pairs):
            raise ValueError(f"{refused} (the metrics of {key} differ)")


def _digest_recipe(text: str, name: str) -> str:
    """Return a digest of what a recipe asks for. Comments, the order of tables, title and note do not change it."""
    content = json.dumps(_read_recipe_content(text, name), sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _read_recipe_content(text: str, name: str) -> dict[str, Any]:
    """Return the entries of a recipe without title and note, which say nothing of its runs."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"recipe {name} is not TOML: {error}") from error
    return {key: value for key, value in document.items() if key not in ("title", "note")}


def _read_lines(path: Path, recipe: str) -> list[tuple[int, dict[str, str]]]:
    """Read the lines of a packed file, each checked.

    Args:
        path: Path of the .csv file.
        recipe: Digest of the recipe that lies beside it.

    Returns:
        Number and cells of each line.

    Raises:
        ValueError: The file or its recipe was damaged or edited, or it is of another kind.
    """
    found = []
    for number, row in _read_csv(path):
        cells = dict(zip(COLUMNS, row, strict=False))
        if len(row) != len(COLUMNS) or compute_digest(cells) != cells["digest"]:
            raise ValueError(f"line {number} of {path} was damaged or edited; {_RESTORE}")
        if cells["recipe"] != recipe:
            raise ValueError(
                f"{path.with_suffix('.toml')} is not the recipe that {path.name} was packed with: more than its title "
                "and note was edited; take it from version control again, or change the recipe, measure and pack anew"
            )
        found.append((number, cells))
    return found


def _read_csv(path: Path) -> list[tuple[int, list[str]]]:
    """Return the rows after the header, each with the number of its last line."""
    try:
        text = path.read_bytes().decode()
        # The counts of a long stream at batch size 1 are longer than what csv takes by default.
        with _CSV_LIMIT:
            before = csv.field_size_limit()
            csv.field_size_limit(max(before, len(text)))
            try:
                reader = csv.reader(io.StringIO(text, newline=""), strict=True)
                _check_header(next(reader, []), path)
                return [(reader.line_num, row) for row in reader]
            finally:
                csv.field_size_limit(before)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as CSV ({error}); {_RESTORE}") from error


def _check_header(header: Sequence[str], path: Path) -> None:
    if header == list(COLUMNS):
        return
    if not {"key", "asked", "digest"} <= set(header):
        raise ValueError(f"{path} holds no packed runs; ttvd runs STORE --pack FOLDER writes them")
    odd = sorted(set(header) ^ set(COLUMNS))
    raise ValueError(
        f"{path} was packed by another version of ttvd: columns differ ({', '.join(odd) or 'order'})"
    )


def _write_lines(path: Path, lines: Iterable[Mapping[str, str]]) -> None:
    with open_atomic(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        usual, quoted = (
            csv.writer(text, lineterminator="\n", quoting=kind) for kind in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)
        )
        usual.writerow(COLUMNS)
        for line in lines:
            cells = [line[name] for name in COLUMNS]
            # A carriage return ends a line for csv's reader, but its writer does not quote it.
            (quoted if any("\r" in cell for cell in cells) else usual).writerow(cells)
        text.detach()


# A run as one line


def _pack_line(
    group: Sequence[tuple[int, Member]], run: Run | None, failed: bool, shared: Mapping[str, str]
) -> dict[str, str]:
    """Write the cells of one run, which may serve several members of the recipe."""
    spec = group[0][1].spec
    asked = [[place, m.label, m.role, dict(m.varies), dict(m.condition)] for place, m in group]
    line = dict.fromkeys(COLUMNS, "") | {"key": spec.key, "status": "failed" if failed else "missing"}
    line |= _pack_spec(spec)
    if run is not None:
        # Runs that only choose a setting are in no curve and in no comparison.
        reported = any(member.role != "validation" for _, member in group)
        line |= _pack_scores(run, batches=reported) | {"status": "done"}
    line |= {**shared, "asked": to_json(asked)}
    return line | {"digest": compute_digest(line)}


def compute_digest(cells: Mapping[str, str]) -> str:
    """Return the digest of a line: of all its cells but the digest."""
    text = json.dumps([cells[name] for name in COLUMNS if name != "digest"])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _pack_spec(spec: Spec) -> dict[str, str]:
    document = spec.document()
    return {name: _write_cell(document[name], kind) for name, kind in _SPEC.items()}


def _unpack_spec(cells: Mapping[str, str]) -> Spec:
    return Spec.from_document({name: _read_cell(cells[name], kind) for name, kind in _SPEC.items()})


def _pack_scores(run: Run, *, batches: bool) -> dict[str, str]:
    """Write the cells of scores and facts. A run that was packed before gives the same cells again.

    Args:
        run: The finished run.
        batches: Whether to keep the correct samples of single batches.
    """
    record = run.record
    again = run.spec.join not in ("continual", "mixed")
    domains = [0] if again else sorted({row.domain for row in record.rows})
    parts = [
        _pack_part(domain, [row for row in record.rows if row.domain == domain])
        for domain in (domains if domains != [0] else [])
    ]
    sizes = [int(size) for size in record.sizes().tolist()]
    visited = record.domains() if again else [None] * len(sizes)
    right = None
    if batches and has_batches(run):
        right = [int(size - wrong) for size, wrong in zip(sizes, record.wrong(), strict=True)]
    values: dict[str, Any] = record.metrics().state() | {"kept": record.kept(), "parts": parts or None}
    values |= {"sizes": list(zip(visited, sizes, strict=True)), "right": right}
    values |= {"batch_seconds": record.seconds_per_batch()}
    values |= {item.name: getattr(run.facts, item.name) for item in fields(Facts)}
    return {name: _write_cell(values[name], kind) for name, kind in (_SCORES | FACT_COLUMNS).items()}


def _unpack_run(spec: Spec, cells: Mapping[str, str]) -> Run:
    """Read the run that was packed, with sums instead of batches.

    Raises:
        ValueError: The cells contradict each other.
    """
    values = {name: _read_cell(cells[name], kind) for name, kind in (_SCORES | FACT_COLUMNS).items()}
    whole: State = {name: values[name] for name in _STATE}
    metrics = RunningMetrics.from_state(whole).compute()
    sizes, right = tuple(size for _, size in values["sizes"]), values["right"]
    if metrics["n"] != sum(sizes):
        raise ValueError("the sizes of its batches do not sum up to n")
    if right is not None and sum(right) != whole["correct"]:
        raise ValueError("the correct predictions of its batches do not sum up to correct")
    seconds = values["batch_seconds"]
    per_sample = seconds / float(torch.tensor(sizes).median())
    rows = [_unpack_part(part, per_sample) for part in values["parts"] or ()]
    rows = rows or [Row(whole, values["kept"], per_sample * values["n"])]
    if sum_metrics(rows).compute()["error"] != metrics["error"]:
        raise ValueError("the sums of its domains are not those of the stream")
    visited = _find_domains(values["sizes"], rows)
    if not all(0 <= domain < len(spec.domains) for domain in visited):
        raise ValueError("a batch is of a domain that the run does not have")
    counts = None if right is None else tuple(right)
    record = PackedRecord(tuple(rows), whole, sizes, visited, counts, values["kept"], seconds)
    return Run(spec, record, Facts(**{item.name: values[item.name] for item in fields(Facts)}))


def _find_domains(sizes: Sequence[tuple[int | None, int]], rows: Sequence[Row]) -> tuple[int, ...]:
    """Return the domain of each batch. Where none is written, the domains come one after the other."""
    ends = np.cumsum([row.metrics["n"] for row in rows])
    starts = np.cumsum([0, *(size for _, size in sizes[:-1])])
    places = np.searchsorted(ends[:-1], starts, side="right")
    return tuple(
        rows[place].domain if domain is None else domain
        for (domain, _), place in zip(sizes, places, strict=True)
    )


def _pack_part(domain: int, rows: Sequence[Row]) -> list[Any]:
    """Return the domain, the share kept (as text, because it may be NaN) and the sums."""
    sums = sum_metrics(rows).state()
    kept = rows[0].kept if len(rows) == 1 else Record(tuple(rows)).kept()
    return [domain, repr(kept), *(sums[name] for name in _STATE)]


def _unpack_part(part: Sequence[Any], per_sample: float) -> Row:
    domain, kept, *sums = part
    return Row(dict(zip(_STATE, sums, strict=True)), float(kept), per_sample * sums[0], domain)


def _write_cell(value: Any, kind: str) -> str:
    """Write a cell; :func:`_read_cell` gives the value back."""
    if value is None:
        return ""
    if kind == "json":
        return to_json(value)
    if kind == "sizes":
        words = [f"{size}" if domain is None else f"{domain}:{size}" for domain, size in value]
        return _write_cell(words, "counts")
    if kind == "counts":
        groups = [(size, len(list(group))) for size, group in groupby(value)]
        return " ".join(str(size) if times == 1 else f"{size}x{times}" for size, times in groups)
    if kind == "numbers":
        return " ".join(_write_number(number) for number in value)
    return _write_number(value) if kind == "real" else str(value)


def _write_number(number: float) -> str:
    """Write the shortest text that is read as the same number; whole numbers have no point."""
    whole = number == number and abs(number) < 2**53 and number == int(number)
    return str(int(number)) if whole else repr(number)


def _read_cell(text: str, kind: str) -> Any:
    if kind == "text":
        return text
    if not text:
        return None
    if kind == "flag":
        return {"True": True, "False": False}[text]
    if kind == "numbers":
        return [float(word) for word in text.split()]
    if kind in ("counts", "sizes"):
        words = [word.partition("x") for word in text.split()]
        pairs = [(number, int(times or 1)) for number, _, times in words]
        if sum(times for _, times in pairs) > _MOST_BATCHES:
            raise ValueError(f"more than {_MOST_BATCHES:,} batches")
        read = int if kind == "counts" else _read_size
        return [value for number, times in pairs for value in [read(number)] * times]
    readers: dict[str, Any] = {"json": json.loads, "whole": int, "real": float}
    return readers[kind](text)


def _read_size(text: str) -> tuple[int | None, int]:
    """Read the domain of a batch, None where it is not written, and its number of samples."""
    domain, colon, size = text.rpartition(":")
    return int(domain) if colon else None, int(size)


# The union of several stores


def _check_same_recipe(here: str, there: str, path: Path) -> None:
    """Refuse to mix the runs of two recipes that have the same name.

    Args:
        here: TOML of the store.
        there: TOML beside the file.
        path: Path of the file.

    Raises:
        ValueError: They ask for different things; the message names the entries that differ.
    """
    ours, theirs = (_flatten(_read_recipe_content(text, path.stem)) for text in (here, there))
    if odd := _describe_differences(ours, theirs):
        raise ValueError(
            f"the recipe {path.stem} of this store is not the one of {path.with_suffix('.toml')}: {odd}. "
            f"{_NOT_WRITTEN}"
        )


def _unite_members(here: Sequence[Member], there: Sequence[Member], path: Path) -> list[Member]:
    """Return what two stores ask for together under one recipe: their seeds add up.

    Args:
        here: Members of the store.
        there: Members of the file; they come first, in their order.
        path: Path of the file.

    Raises:
        ValueError: The same cell of a table would hold runs that differ in more than their seeds, e.g. in their limit,
            because one store is a trial. The message names what differs.
    """
    known = {_get_cell(member): member.spec for member in there}
    for member in here:
        other = known.get(_get_cell(member))
        if other is not None and (
            odd := _describe_differences(_flatten_spec(member.spec), _flatten_spec(other))
        ):
            raise ValueError(
                f"{path} holds other runs of this recipe than this store: {odd} (line {member.label!r}, "
                f"{member.spec.domain_label}). {_NOT_WRITTEN}"
            )
    have = {_identify(member) for member in there}
    return [*there, *(member for member in here if _identify(member) not in have)]


def _identify(member: Member) -> str:
    """Return a text that two members share if they are the same run in the same cell of a table."""
    return to_json([_get_cell(member), member.spec.key])


def _get_cell(member: Member) -> str:
    """Return the cell that a run belongs to in the table of its recipe, whatever its seed."""
    domains = member.spec.document()["domains"]
    parts = [member.label, member.role, dict(member.varies), dict(member.condition)]
    return to_json([*parts, domains, member.spec.selection])


def _flatten_spec(spec: Spec) -> dict[str, Any]:
    """Return all entries of a spec but its seed, parameters and options one by one."""
    document = spec.document()
    seed = document.pop("seed")
    if document["parameters"].get("seed") == seed:
        del document["parameters"]["seed"]
    return _flatten(document)


def _flatten(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of tables as ``table.entry``."""
    flat: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            flat[name] = value
    return flat


def _describe_differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """Describe the entries that differ; empty where none does."""

    def show(entries: Mapping[str, Any], name: str) -> str:
        value = entries.get(name)
        text = "not given" if value is None else repr(value)
        return text if len(text) <= 60 else f"{text[:60]}..."

    odd = [name for name in sorted({*here, *there}) if repr(here.get(name)) != repr(there.get(name))]
    return ", ".join(f"{name} is {show(there, name)} there and {show(here, name)} here" for name in odd)
