"""Runs of a recipe in a CSV file that can be committed: written from a store, read like one."""

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ttvd.bench.spec import Member, Run, Spec
from ttvd.bench.store.codec import to_json
from ttvd.bench.store.packed import COLUMNS, has_batches, pack_run, pack_spec, seal, unpack_run, unpack_spec
from ttvd.bench.store.reader import Reader, check_name, check_recipe, pick_key
from ttvd.bench.store.sheet import AGAIN, digest_recipe, read_lines, write_lines
from ttvd.bench.store.store import Store
from ttvd.bench.store.union import check_same_recipe, identify, unite_members
from ttvd.bench.store.values import Failure, Figure, Summary
from ttvd.files import open_atomic

_SQLITE = b"SQLite format 3\0"  # how a store begins, whatever it is called


class Pack:
    """The runs of one recipe as a file holds them; whatever reads a store can read it too.

    Beside NAME.csv, which has a line for each run that the recipe asks for, lies NAME.toml, the recipe. Every line has
    a digest of itself and of what the recipe asks for, and all lines together must be those of the recipe: damage does
    not go unnoticed. Nothing in the file can run code.

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
        try:
            self._text = recipe.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{recipe} is not a text file ({error}); {AGAIN}") from error
        self._runs: dict[str, Run] = {}
        self._failed: dict[str, Spec] = {}
        members: list[tuple[int, Member]] = []
        totals: set[str] = set()
        for number, cells in read_lines(path, digest_recipe(self._text, self.name)):
            try:
                members += self._take(cells)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"line {number} of {path} is not a run of this version: {error}") from error
            totals.add(cells["members"])
        places = [place for place, _ in members]
        if totals != {str(len(places))} or sorted(places) != list(range(len(places))):
            raise ValueError(f"{path} does not have all lines of its recipe, each once; {AGAIN}")
        self._members = [member for _, member in sorted(members, key=lambda pair: pair[0])]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def _take(self, cells: Mapping[str, str]) -> list[tuple[int, Member]]:
        """Keep the run of a line; what it serves for comes back, with places."""
        spec = unpack_spec(cells)
        if spec.key != cells["key"]:
            raise ValueError(f"the key of its spec is {spec.key}, not {cells['key']}")
        if cells["status"] == "done":
            self._runs[spec.key] = unpack_run(spec, cells)
        elif cells["status"] == "failed":
            self._failed[spec.key] = spec
        elif cells["status"] != "missing":
            raise ValueError(f"its status is {cells['status']!r}")
        return [
            (place, Member(self.name, label, role, spec, varies, condition))
            for place, label, role, varies, condition in json.loads(cells["asked"])
        ]

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
        """Runs that failed; why and when is told by the store alone, since tracebacks speak of the machine."""
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


def write_pack(source: Reader, recipe: str, folder: Path, *, replace: bool = False) -> tuple[Path, int]:
    """Pack the runs of a recipe into FOLDER/RECIPE.csv, and the recipe beside it.

    The runs of a recipe may come from several stores: what is in such a file already stays there, its failures too,
    and what the source asks for beyond it, e.g. other seeds, is added. The new file is read back before it takes the
    place of the old one.

    Args:
        source: A store, or packed runs.
        recipe: Its name there.
        folder: Made if it is not there.
        replace: Let the file ask for what the source asks for, and for nothing else; of the runs that it has, those
            that the source asks for stay.

    Returns:
        The .csv file, and the number of finished runs in it.

    Raises:
        ValueError: There is no such recipe, its name is no plain name, the file that is there is damaged, or it holds
            runs that cannot stand beside those of the source (another recipe, a trial with another limit).
    """
    check_name(recipe)
    members, text = source.members(recipe), source.recipes()[recipe]
    path = folder / f"{recipe}.csv"
    old = Pack(path) if path.exists() else None
    if old is not None and not replace:
        check_same_recipe(text, old.recipes()[recipe], path)
        members = unite_members(members, old.members(recipe), path)
    asked: dict[str, list[tuple[int, Member]]] = {}
    for place, member in enumerate(members):
        asked.setdefault(member.spec.key, []).append((place, member))
    runs, failed = _gather(source, old, asked)
    shared = {"recipe": digest_recipe(text, recipe), "members": str(len(members))}
    lines = [_make_line(group, runs.get(key), key in failed, shared) for key, group in asked.items()]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pack-", dir=folder) as scratch:
        draft = Path(scratch, path.name)
        with open_atomic(draft.with_suffix(".toml")) as file:
            file.write(text.encode())
        write_lines(draft, lines)
        _check_draft(draft, path, members, runs)
        for end in (".toml", ".csv"):
            draft.with_suffix(end).replace(path.with_suffix(end))
    return path, len(runs)


def _gather(source: Reader, old: Pack | None, keys: Iterable[str]) -> tuple[dict[str, Run], set[str]]:
    """Finished runs of the source and of the file that is there, and keys of those that failed and are not done."""
    runs = source.load(keys)
    failed = {failure.key for failure in source.failures()}
    if old is not None:
        failed |= {failure.key for failure in old.failures()}
        for key, run in old.load(keys).items():
            if key not in runs or not has_batches(runs[key]):
                runs[key] = run
    return runs, failed - set(runs)


def _check_draft(draft: Path, path: Path, members: Sequence[Member], runs: Mapping[str, Run]) -> None:
    """Refuse a file that does not give back what was written.

    Raises:
        ValueError: It cannot be read, or has other members, runs or metrics.
    """
    refused = f"{path} was not written: the new file does not give back the runs"
    try:
        found = Pack(draft)
    except (ValueError, OSError) as error:
        raise ValueError(f"{refused} ({error})") from error
    there = [identify(member) for member in found.members(draft.stem)]
    if there != [identify(member) for member in members] or found.done() != set(runs):
        raise ValueError(f"{refused} (it has others)")
    for key, run in found.load(runs).items():
        pairs = [(run.totals[name], value) for name, value in runs[key].totals.items()]
        if any(
            now != before and (now == now or before == before) for now, before in pairs
        ):  # NaN may stay NaN
            raise ValueError(f"{refused} (the metrics of {key} differ)")


def _make_line(
    group: Sequence[tuple[int, Member]], run: Run | None, failed: bool, shared: Mapping[str, str]
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
    line |= {**shared, "asked": to_json(asked)}
    return line | {"digest": seal(line)}


def unpack(pack: Pack, store: Store) -> int:
    """Put packed runs and their recipe into a store, to go on from there; single batches are not known any more.

    Returns:
        How many runs the store did not have.
    """
    store.enroll(pack.name, pack.recipes()[pack.name], pack.members(pack.name))
    return sum(store.add(run) for run in pack.load(sorted(pack.done())).values())
