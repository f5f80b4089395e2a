"""Runs of a recipe in a CSV file that can be committed: written from a store, read like one."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ttvd.bench.spec import Member, Run, Spec
from ttvd.bench.store.codec import to_json
from ttvd.bench.store.packed import COLUMNS, has_batches, pack_run, pack_spec, seal, unpack_run, unpack_spec
from ttvd.bench.store.reader import Reader, check_recipe, pick_key
from ttvd.bench.store.store import Store
from ttvd.bench.store.values import Failure, Figure, Summary
from ttvd.files import open_atomic

_SQLITE = b"SQLite format 3\0"  # how a store begins, whatever it is called
AGAIN = "take it from version control again, or pack the store again: ttvd runs STORE --pack FOLDER"


class Pack:
    """The runs of one recipe as a file holds them; whatever reads a store can read it too.

    Beside NAME.csv, which has a line for each run that the recipe asks for, lies NAME.toml, the recipe. Every line has
    a digest of itself, and all lines together must be those of the recipe: damage does not go unnoticed. Nothing in
    the file can run code.

    Args:
        path: The .csv file.

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
        self._text = recipe.read_text(encoding="utf-8")
        self._runs: dict[str, Run] = {}
        self._failed: dict[str, Spec] = {}
        members: dict[int, Member] = {}
        for number, cells in read_lines(path):
            try:
                self._take(cells, members)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"line {number} of {path} is not a run of this version: {error}") from error
        self._members = [members[place] for place in sorted(members)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def _take(self, cells: Mapping[str, str], members: dict[int, Member]) -> None:
        spec = unpack_spec(cells)
        if spec.key != cells["key"]:
            raise ValueError(f"the key of its spec is {spec.key}, not {cells['key']}")
        for place, label, role, varies, condition in json.loads(cells["asked"]):
            members[place] = Member(self.name, label, role, spec, varies, condition)
        if cells["status"] == "done":
            self._runs[spec.key] = unpack_run(spec, cells)
        elif cells["status"] == "failed":
            self._failed[spec.key] = spec
        elif cells["status"] != "missing":
            raise ValueError(f"its status is {cells['status']!r}")

    def recipes(self) -> dict[str, str]:
        """The name of the recipe and its TOML."""
        return {self.name: self._text}

    def members(self, recipe: str) -> list[Member]:
        """What the recipe asks for, in its order."""
        check_recipe(recipe, [self.name], self.path)
        return list(self._members)

    def done(self) -> set[str]:
        """Keys of the finished runs."""
        return set(self._runs)

    def load(self, keys: Iterable[str]) -> dict[str, Run]:
        """Finished runs; keys that are not done are left out."""
        return {key: self._runs[key] for key in dict.fromkeys(keys) if key in self._runs}

    def summaries(self) -> list[Summary]:
        """All finished runs without their rows."""
        return [
            Summary(key, run.spec, run.totals, run.facts, len(run.record.sizes()), run.record.kept())
            for key, run in self._runs.items()
        ]

    def failures(self) -> list[Failure]:
        """Runs that failed; why is told by the store alone, since tracebacks speak of the machine."""
        text = "It failed; the store that this file was made from has the traceback."
        return [Failure(key, spec, text, 0.0) for key, spec in self._failed.items()]

    def claimed(self) -> set[str]:
        """Nobody works on a file."""
        return set()

    def figures(self, recipe: str) -> list[Figure]:
        """None: figures stay in the store, for they show images."""
        return []

    def find(self, prefix: str) -> str:
        """The key that begins so."""
        keys = {member.spec.key for member in self._members}
        return pick_key(sorted(key for key in keys if key.startswith(prefix.lower())), prefix, self.path)


def open_runs(path: Path) -> Store | Pack:
    """A store, or packed runs (a .csv file), for reading."""
    if path.suffix == ".csv" and path.is_file():
        with path.open("rb") as file:
            if file.read(len(_SQLITE)) != _SQLITE:
                return Pack(path)
    return Store(path, create=False, readonly=True)


def write_pack(source: Reader, recipe: str, folder: Path) -> tuple[Path, int]:
    """Pack the runs of a recipe into FOLDER/RECIPE.csv, and the recipe beside it.

    Runs that are missing in the source and are in such a file already stay there: the runs of a recipe may come from
    several stores.

    Args:
        source: A store, or packed runs.
        recipe: Its name there.
        folder: Made if it is not there.

    Returns:
        The .csv file, and the number of finished runs in it.

    Raises:
        ValueError: There is no such recipe, or the file that is there is damaged.
    """
    members = source.members(recipe)
    path = folder / f"{recipe}.csv"
    asked: dict[str, list[tuple[int, Member]]] = {}
    for place, member in enumerate(members):
        asked.setdefault(member.spec.key, []).append((place, member))
    runs = source.load(asked)
    if path.exists():
        for key, run in Pack(path).load(asked).items():
            if key not in runs or not has_batches(runs[key]):
                runs[key] = run
    failed = {failure.key for failure in source.failures()} - set(runs)
    lines = [_make_line(group, runs.get(key), key in failed, len(members)) for key, group in asked.items()]
    with open_atomic(path.with_suffix(".toml")) as file:
        file.write(source.recipes()[recipe].encode())
    with open_atomic(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([line[name] for name in COLUMNS] for line in lines)
        text.detach()
    return path, len(runs)


def _make_line(
    group: Sequence[tuple[int, Member]], run: Run | None, failed: bool, total: int
) -> dict[str, str]:
    spec = group[0][1].spec
    asked = [[place, m.label, m.role, dict(m.varies), dict(m.condition)] for place, m in group]
    line = dict.fromkeys(COLUMNS, "") | {"key": spec.key, "status": "failed" if failed else "missing"}
    if run is None:
        line |= pack_spec(spec)
    else:
        # Runs that only choose a setting are in no curve and in no comparison.
        reported = any(member.role == "test" for _, member in group)
        line |= pack_run(run, batches=reported) | {"status": "done"}
    line |= {"members": str(total), "asked": to_json(asked)}
    return line | {"digest": seal(line)}


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Numbers and cells of the lines of a packed file, each checked, and all of them together.

    Raises:
        ValueError: The file was damaged or cut, or is of another kind.
    """
    places: list[int] = []
    totals: set[str] = set()
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            _check_header(next(reader, []), path)
            for row in reader:
                cells = dict(zip(COLUMNS, row, strict=False))
                if len(row) != len(COLUMNS) or seal(cells) != cells["digest"]:
                    raise ValueError(f"line {reader.line_num} of {path} was damaged or edited; {AGAIN}")
                yield reader.line_num, cells
                places += _list_places(cells)
                totals.add(cells["members"])
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read as CSV ({error}); {AGAIN}") from error
    if totals != {str(len(places))} or sorted(places) != list(range(len(places))):
        raise ValueError(f"{path} does not have all lines of its recipe, each once; {AGAIN}")


def _list_places(cells: Mapping[str, str]) -> list[int]:
    asked: list[list[Any]] = json.loads(cells["asked"])
    return [entry[0] for entry in asked]


def _check_header(header: Sequence[str], path: Path) -> None:
    if header == list(COLUMNS):
        return
    if not {"key", "asked", "digest"} <= set(header):
        raise ValueError(f"{path} holds no packed runs; ttvd runs STORE --pack FOLDER writes them")
    odd = sorted(set(header) ^ set(COLUMNS))
    raise ValueError(
        f"{path} was packed by another version of ttvd: columns differ ({', '.join(odd) or 'order'})"
    )


def unpack(pack: Pack, store: Store) -> int:
    """Put packed runs and their recipe into a store, to go on from there; single batches are not known any more.

    Returns:
        How many runs the store did not have.
    """
    store.enroll(pack.name, pack.recipes()[pack.name], pack.members(pack.name))
    return sum(store.add(run) for run in pack.load(sorted(pack.done())).values())
