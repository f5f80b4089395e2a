"""What is fuzzed: files of every kind that ttvd reads, and what may become of odd ones.

An odd file is read, or it is refused with a message that names it, by an exception that the command line prints without
a traceback. `tests/test_fuzz.py` tries some cases of every target, `tools/fuzz.py` as many as there is time for.
"""

import copy
import json
import random
import shutil
import signal
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from torch import nn

from tests.helpers.bench import digits_resources
from tests.helpers.damage import damage
from tests.helpers.data import random_pixels
from tests.helpers.store import make_long_run, temporary_folder
from ttvd.bench.export import list_runs
from ttvd.bench.figures import check_figures
from ttvd.bench.packed import PackedRuns, pack_runs
from ttvd.bench.plan import plan
from ttvd.bench.recipe import read_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import Member
from ttvd.bench.store import Reader, Store
from ttvd.bench.study import study
from ttvd.data.loading import read_image
from ttvd.deploy.inputs import iterate_batches, open_inputs
from ttvd.deploy.states import StateFile, identify
from ttvd.methods import Adapter, create
from ttvd.nn.fingerprint import fingerprint
from ttvd.source.fisher import load_fisher, save_fisher
from ttvd.zoo.checkpoint import Card, build_model, load_checkpoint, save_checkpoint
from ttvd.zoo.sites import Sites
from ttvd.zoo.source_features import SourceFeatures
from ttvd.zoo.tensorfile import compute_checksum

REFUSALS = (ValueError, OSError)
"""Exceptions that say what is wrong with an input; the command line prints their messages."""
SECONDS = 20
"""A case that takes longer hangs."""
TRAP = "trap_of_the_fuzz_test"
"""A module that odd recipes name. Nobody may import it."""
_EVENTS = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")

Mutate = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Target:
    """A kind of file.

    Attributes:
        write: Writes valid files to a folder, and returns the path of the one that is made odd.
        read: Reads this file as commands do. Returns what was found, which can be compared.
        mutate: Makes the content of a valid file odd.
        exact: Whether a file that is accepted must give back what was written.
    """

    write: Callable[[Path], Path]
    read: Callable[[Path], Any]
    mutate: Mutate = damage
    exact: bool = True


class FuzzError(AssertionError):
    """An odd file was neither read as it was written nor refused with a message."""


class _Hang(BaseException):
    pass


class Fuzzer:
    """Tries odd files of one target.

    Args:
        name: Name of the target, one of ``TARGETS``.
        folder: An empty folder.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.target, self._folder = name, TARGETS[name], folder
        self._valid = folder / "valid"
        self._valid.mkdir()
        path = self.target.write(self._valid)
        if path.suffix == ".safetensors":
            path.write_bytes(_sort_header(path.read_bytes()))
        self._file, self._content = path.name, path.read_bytes()
        self._value = self.target.read(path)

    def make(self, seed: int) -> bytes:
        """Return the odd content of a case."""
        return self.target.mutate(self._content, random.Random(f"{self.name} {seed}"))

    def run(self, content: bytes) -> str:
        """Read odd content. Returns ``"equal"``, ``"other"`` or ``"refused"``.

        Raises:
            FuzzError: Something else happened.
        """
        here = self._folder / "case"
        shutil.copytree(self._valid, here)
        try:
            path = here / self._file
            path.write_bytes(content)
            return self._read(path)
        finally:
            shutil.rmtree(here)

    def _read(self, path: Path) -> str:
        try:
            with _limit_seconds(), _watch_code():
                found = self.target.read(path)
        except REFUSALS as error:
            if path.stem not in str(error):
                raise FuzzError(f"{self.name}: the message does not name the file: {error!r}") from error
            return "refused"
        except _Hang as error:
            raise FuzzError(f"{self.name}: no answer within {SECONDS} s") from error
        except Exception as error:
            raise FuzzError(f"{self.name}: {type(error).__name__}: {error}") from error
        if found == self._value:
            return "equal"
        if self.target.exact:
            raise FuzzError(f"{self.name}: other values were read than were written, without a word")
        return "other"


@contextmanager
def open_fuzzer(name: str) -> Iterator[Fuzzer]:
    """Give a fuzzer with a folder of its own."""
    with temporary_folder() as folder:
        yield Fuzzer(name, folder)


@contextmanager
def _limit_seconds() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


_watching = False


@cache
def _add_hook() -> None:
    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if _watching and event in _EVENTS:
            raise AssertionError(f"code was run: {event} {arguments}")

    sys.addaudithook(watch)  # it stays for good


@contextmanager
def _watch_code() -> Iterator[None]:
    """Refuse programs, pickled classes and the trap."""
    global _watching
    _add_hook()
    _watching = True
    try:
        yield
    finally:
        _watching = False
    assert TRAP not in sys.modules, "the trap was imported"


# Odd documents

_ODD: tuple[Any, ...] = (
    *(float("nan"), float("inf"), -float("inf"), -1, 0, 1, -1.5, 0.5, 1e308, 5e-324, 1e-3, 7),
    *(2**31, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63) - 1, True, False, None),
    *("", " ", "x", "x" * 2000, "\x00", "\ud7ff\u202e", "64", "true", "nan", "none", "../up", "/", "*", "fog", "all"),
    *(f"{TRAP}:make", f"{TRAP}:Class", "ttvd.testing:nothing", "a:b:c", ":", "digits-sla", "bn", "oracle"),
    *([], {}, [[]], [{}], [None], [1, "a"], [1, 1], {"a": 1}, {"": {}}, [float("nan")], [0] * 300, ["fog", "fog"]),
)  # fmt: skip


def mutate_document(document: Any, rng: random.Random) -> Any:
    """Return a copy of a document of tables, lists and values in which a few entries are odd."""
    changed = json.loads(json.dumps(document))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        parent, key = rng.choice(list(_list_places(changed)))
        match rng.randrange(8):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, dict):
                parent[rng.choice((f"{key}s", key[1:], "unknown", "", "x" * 300, "nul\x00"))] = parent[key]
            case 2:
                parent[key] = [parent[key]] * rng.choice((1, 2))
            case 3 if isinstance(parent[key], int | float):
                parent[key] *= rng.choice((-1, 0, 10, 0.5, 1e6))
            case 4:
                parent[key] = _nest(rng.choice((3, 60, 3000)), rng)
            case _:
                parent[key] = copy.deepcopy(rng.choice(_ODD))
        if not changed:
            break
    return changed


def _list_places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a document with every key or index of it."""
    for key in list(document) if isinstance(document, dict) else range(len(document)):
        yield document, key
        if isinstance(document[key], dict | list):
            yield from _list_places(document[key])


class _Raw(str):
    """A text that is written as it is."""


def _nest(depth: int, rng: random.Random) -> _Raw:
    return _Raw("[" * depth + "]" * rng.choice((depth, depth, 0)))


def to_text(value: Any, *, toml: bool) -> str:
    """Write a value as TOML or JSON, odd ones too."""
    if isinstance(value, _Raw):
        return str(value)
    if isinstance(value, dict):
        sign = "=" if toml else ":"
        pairs = (f"{json.dumps(key)} {sign} {to_text(item, toml=toml)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(to_text(item, toml=toml) for item in value)}]"
    if toml and (value is None or isinstance(value, float)):
        return "1979-05-27" if value is None else repr(value)
    return json.dumps(value)


def reencode(content: bytes, rng: random.Random) -> bytes:
    """Return a text in another encoding, or with bytes that do not belong there."""
    text = content.decode(errors="replace")
    kinds = [text.encode(kind, errors="replace") for kind in ("utf-16", "utf-8-sig", "utf-32", "cp037")]
    return rng.choice(
        [*kinds, content.replace(b"\n", b"\x00"), content + b"\x1a", content + b"\xff\xfe", b""]
    )


def _mutate_text(document: Any, *, toml: bool) -> Mutate:
    """A document that is odd in its structure, in its bytes or in its encoding."""

    def mutate(content: bytes, rng: random.Random) -> bytes:
        kind = rng.randrange(10)
        if kind < 2:
            return damage(content, rng)
        if kind < 3:
            return reencode(content, rng)
        return _write_document(mutate_document(document, rng), toml=toml).encode(errors="surrogatepass")

    return mutate


def _write_document(document: Any, *, toml: bool) -> str:
    if not toml or not isinstance(document, dict):
        return to_text(document, toml=toml)
    return "\n".join(f"{json.dumps(key)} = {to_text(value, toml=True)}" for key, value in document.items())


# Recipes

RECIPE: dict[str, Any] = {
    "title": "Odd",
    "note": "A note.",
    "reference": "tent",
    "seeds": [0, 1],
    "rules": ["validation", "oracle"],
    "precision": "float32",
    "sites": [1.0],
    "data": {
        "set": "digits", "corruptions": ["fog", "none"], "severity": 3, "severities": {"fog": 2},
        "constants": "imagenet", "limit": 128, "validation": ["spatter"],
    },
    "stream": {"order": "dirichlet", "join": "reset", "batch_size": [16, 8], "alpha": 0.5},
    "checkpoints": {"plain": "digits-plain", "sites": "digits-sla"},
    "params": {"lr": 0.001},
    "grid": {"steps": [1, 2]},
    "oracle": {"steps": 2, "episodic": True, "limit": 64, "seeds": [0]},
    "methods": [
        {"name": ["bn", "tent"]},
        {
            "name": "ttvd", "label": "ours", "checkpoint": "digits-sla", "params": {"lr": 0.01}, "grid": {"steps": [1]},
            "rules": ["grid-best"], "seeds": [0], "episodic": False,
        },
        {"name": "source", "label": "views", "checkpoint": "digits-sla", "views": 4},
    ],
    "figures": [{"kind": "samples", "checkpoint": "digits-sla", "corruption": "fog", "limit": 32, "count": 1}],
}  # fmt: skip


@cache
def _digits() -> Resources:
    return digits_resources()


def _write_recipe(folder: Path) -> Path:
    path = folder / "strange.toml"
    path.write_text(_write_document(RECIPE, toml=True))
    return path


def _plan_recipe(path: Path) -> Any:
    recipe = read_recipe(path)
    members = plan(recipe, _digits())
    check_figures(recipe, _digits())
    return [member.spec.key for member in members]


# Checkpoints, their cards, sites and other tensors

CARD = Card(
    "resnet", {"num_classes": 6, "in_channels": 1, "widths": [4, 6], "blocks": [1, 1], "mean": [0.5], "std": [0.25]},
    head_views=2, data="invented", training={"epochs": 1}, seed=0, accuracy_one_view=0.5, input_shape=(1, 8, 8),
)  # fmt: skip


def _write_checkpoint(folder: Path) -> Path:
    torch.manual_seed(0)
    save_checkpoint(folder / "strange.safetensors", build_model(CARD), CARD)
    return folder / "strange.safetensors"


def _write_card(folder: Path) -> Path:
    return _write_checkpoint(folder).with_suffix(".json")


def _read_checkpoint(path: Path) -> Any:
    model, card = load_checkpoint(path.with_suffix(".safetensors"))
    return fingerprint(model), card


def _mutate_card(content: bytes, rng: random.Random) -> bytes:
    return _mutate_text(json.loads(content), toml=False)(content, rng)


def _make_sites() -> Sites:
    means = torch.arange(24, dtype=torch.float64).reshape(3, 2, 4)
    return Sites(means, torch.ones(3, 2).long(), "0" * 16, 0.5, {"vd": 1.5, "civd/-0.8": 2.0}, {}, 0.25)


def _write_sites(folder: Path) -> Path:
    _make_sites().save(folder / "strange.safetensors")
    return folder / "strange.safetensors"


def _read_sites(path: Path) -> Any:
    sites = Sites.load(path)
    return (
        repr(sites),
        sites.means.tolist(),
        sites.counts.tolist(),
        sites.fingerprint,
        dict(sites.temperatures),
    )


def _forge_tensors(content: bytes, rng: random.Random) -> bytes:
    """A file of tensors whose checksum is right, with odd tensors and strings."""
    from safetensors.torch import load, save

    size = int.from_bytes(content[:8], "little")
    strings = json.loads(content[8 : 8 + size])["__metadata__"]
    tensors = dict(sorted(load(content).items()))
    name = rng.choice(list(tensors))
    match rng.randrange(7):
        case 0:
            del tensors[name]
        case 1:
            tensors[name] = tensors[name].to(
                rng.choice((torch.float32, torch.int8, torch.float16, torch.bool))
            )
        case 2:
            tensors[name] = tensors[name].reshape(rng.choice(((-1,), (1, -1, 1), (-1, 1))))
        case 3 if tensors[name].is_floating_point():
            tensors[name].view(-1)[0] = rng.choice((float("nan"), float("inf"), -1.0, 1e30))
        case 4:
            tensors[rng.choice(("other", "norm_means.1", "norm_means.x", ""))] = torch.zeros(
                rng.choice((0, 2))
            )
        case 5:
            tensors[name] = tensors[name].reshape(-1)[:0]
        case _:
            key = rng.choice(list(strings))
            strings[key] = to_text(rng.choice((*_ODD, _nest(3000, rng))), toml=False)
    strings.pop("ttvd.checksum", None)
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    return _sort_header(save(tensors, {**strings, "ttvd.checksum": compute_checksum(tensors, strings)}))


def _sort_header(content: bytes) -> bytes:
    """A file of tensors whose header has a fixed order; that of safetensors is another one in each process."""
    size = int.from_bytes(content[:8], "little")
    text = json.dumps(json.loads(content[8 : 8 + size]), sort_keys=True).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def _mutate_header(content: bytes, rng: random.Random) -> bytes:
    """A file of tensors with an odd header: entries, offsets, deep nesting."""
    size = int.from_bytes(content[:8], "little")
    header = mutate_document(json.loads(content[8 : 8 + size]), rng)
    text = to_text(header, toml=False).encode(errors="surrogatepass")
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def _make_tent() -> tuple[nn.Module, Adapter]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    return net, create("tent", net)


def _write_state(folder: Path) -> Path:
    net, tent = _make_tent()
    tent(torch.rand(8, 1, 2, 2))
    StateFile(folder / "strange.safetensors", identify("tent", {}, net)).save(tent)
    return folder / "strange.safetensors"


def _read_state(path: Path) -> Any:
    net, tent = _make_tent()
    StateFile(path, identify("tent", {}, net)).load(tent)
    return {name: value.tolist() for name, value in tent.state_dict().items()}


def _write_features(folder: Path) -> Path:
    SourceFeatures(torch.eye(3), torch.tensor([0, 1, 1]), "0" * 16).save(folder / "strange.safetensors")
    return folder / "strange.safetensors"


def _read_features(path: Path) -> Any:
    memory = SourceFeatures.load(path)
    return memory.features.tolist(), memory.labels.tolist(), memory.fingerprint


def _write_fisher(folder: Path) -> Path:
    save_fisher(folder / "strange.safetensors", {"weight": torch.arange(6.0).reshape(3, 2)})
    return folder / "strange.safetensors"


def _read_fisher(path: Path) -> Any:
    return {name: value.tolist() for name, value in load_fisher(path).items()}


# Stores and packed runs

PAGE = 4096
STORED: dict[str, Any] = {
    "title": "Stored",
    "data": {"set": "digits", "corruptions": ["fog"]},
    "checkpoints": {"plain": "digits-sla"},
    "seeds": list(range(8)),
    "methods": [{"name": "tent"}],
}


def _write_store(folder: Path, seeds: int = 8) -> Path:
    """A store with runs, failures, a recipe and figures."""
    runs = [make_long_run(seed) for seed in range(8)]
    members = [Member("strange", "tent", "test", run.spec) for run in runs]
    lost = [replace(run.spec, method="bn") for run in runs[:3]]
    path = folder / "strange.db"
    with patch("time.time", return_value=1.79e9), Store(path) as store:  # the same bytes each time
        store.save_recipe("strange", _write_document(STORED, toml=True), members[:seeds])
        for run in runs[:seeds]:
            store.add(run)
        for spec in lost:
            store.fail(spec, f"Traceback of {spec.key}\n" * 30)
        for name in ("01-samples", "02-slices"):
            store.put_figure(name, "strange", {"kind": name[3:], "seen": seeds}, bytes(range(256)) * 20)
    return path


@cache
def _old_store() -> bytes:
    """The same store before half of it was written."""
    with temporary_folder() as folder:
        return _write_store(folder, seeds=4).read_bytes()


def _read_store(path: Path) -> Any:
    """All that commands take from a store: the list of runs, tables, figures and batches."""
    with Store(path, create=False, readonly=True) as store:
        found = _read_runs(store)
    with Store(path, create=False) as store:  # as `ttvd bench` opens it
        assert found[1] == store.done()
    return found


def _read_runs(store: Reader) -> tuple[Any, ...]:
    listed = sorted(map(repr, list_runs(store)))
    done, recipes = store.done(), store.recipes()
    tables = [[repr(vars(line)) for line in study(store, name).lines] for name in recipes]
    members = [store.members(name) for name in recipes]
    figures = [store.figures(name) for name in recipes]
    runs = {key: repr(run) for key, run in store.load(done).items()}
    return listed, done, recipes, tables, members, figures, runs, repr(store.failures())


def damage_pages(content: bytes, rng: random.Random) -> bytes:
    """A database with damage as disks and file systems do it: bits, pages, and the end of the file."""
    pages = [content[at : at + PAGE] for at in range(0, len(content), PAGE)]
    first, second = (rng.randrange(len(pages)) for _ in range(2))
    old = _old_store()
    match rng.randrange(9):
        case 0:
            pages[first], pages[second] = pages[second], pages[first]
        case 1:
            pages[first] = pages[second]
        case 2:
            pages[first] = bytes(PAGE)
        case 3:  # a page that was never written
            for place in {first, second}:
                pages[place] = old[place * PAGE : (place + 1) * PAGE] or pages[place]
        case 4:
            return content[: rng.randrange(len(content))]
        case 5:
            return content[: first * PAGE]
        case 6:
            return damage(content, rng)
        case _:
            changed = bytearray(content)
            for _ in range(rng.choice((1, 1, 2, 8))):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            return bytes(changed)
    return b"".join(pages)


_CELLS: Mapping[str, tuple[str, ...]] = {
    "runs": ("key", "spec", "facts", "bins", "digest", "method", "domain", "seed", "seconds", "added"),
    "batches": ("run", "number", "domain", "n", "correct", "nll_sum", "kept", "seconds", "bins"),
    "failures": ("key", "spec", "text", "failed", "digest"),
    "recipes": ("name", "text", "digest"),
    "members": ("recipe", "position", "key", "label", "role", "spec", "varies", "condition", "digest"),
    "figures": ("recipe", "name", "description", "payload", "digest"),
    "claims": ("key", "host", "pid", "started", "renewed"),
}


def edit_cells(content: bytes, rng: random.Random) -> bytes:
    """A whole database in which a cell has another value or a row is gone."""
    table = rng.choice(list(_CELLS))
    value = rng.choice((0, -1, 2**62, 0.5, "x", "{}", '{"a": 1}', "[" * 3000, b"\x00\xff", "", "bn"))
    with temporary_folder() as folder:
        path = folder / "edited.db"
        path.write_bytes(content)
        db = sqlite3.connect(path)
        db.execute("INSERT INTO claims VALUES ('0123', 'here', 1, 1.0, 1e18)")
        rowid = "number" if table == "batches" else "rowid"
        count = db.execute(f"SELECT max({rowid}) FROM {table}").fetchone()[0]
        row = rng.randrange(count + 1)
        where = f"WHERE {rowid} = {row}"
        # Failures, figures and the end of a list may be deleted on purpose.
        if rng.random() < 0.2 and table in ("runs", "batches", "recipes", "members") and row < count:
            db.execute(f"DELETE FROM {table} {where}")
        else:
            db.execute(f"UPDATE OR IGNORE {table} SET {rng.choice(_CELLS[table])} = ? {where}", (value,))
        db.commit()
        db.close()
        return path.read_bytes()


def _write_packed(folder: Path) -> Path:
    with temporary_folder() as scratch, Store(_write_store(scratch), readonly=True) as store:
        return pack_runs(store, "strange", folder)[0]


def _read_packed(path: Path) -> Any:
    with PackedRuns(path.with_suffix(".csv")) as packed:
        return _read_runs(packed)


def _write_packed_recipe(folder: Path) -> Path:
    return _write_packed(folder).with_suffix(".toml")


def _read_packed_recipe(path: Path) -> Any:
    """Title, note and the layout of the text may be edited."""
    return [part for place, part in enumerate(_read_packed(path)) if place != 2]


# Pictures and arrays


def _write_picture(folder: Path) -> Path:
    Image.fromarray(random_pixels((16, 12), 0)).save(folder / "strange.png")
    return folder / "strange.png"


def _write_array(folder: Path) -> Path:
    np.save(folder / "strange.npy", random_pixels((16, 12), 0)[None])
    return folder / "strange.npy"


def _read_picture(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of damage that it can live with
        return read_image(path, 8, 8, max_pixels=1 << 20).tolist()


def _read_array(path: Path) -> Any:
    batches = list(iterate_batches(open_inputs(path, max_pixels=1 << 20), 4, workers=0))
    return [batch.images.tolist() for batch in batches if batch.images is not None]


TARGETS: dict[str, Target] = {
    "recipe": Target(_write_recipe, _plan_recipe, _mutate_text(RECIPE, toml=True), exact=False),
    "card": Target(_write_card, _read_checkpoint, _mutate_card, exact=False),
    "checkpoint": Target(_write_checkpoint, _read_checkpoint),
    "checkpoint, header": Target(_write_checkpoint, _read_checkpoint, _mutate_header),
    "checkpoint, forged": Target(_write_checkpoint, _read_checkpoint, _forge_tensors),
    "sites": Target(_write_sites, _read_sites),
    "sites, header": Target(_write_sites, _read_sites, _mutate_header),
    "sites, forged": Target(_write_sites, _read_sites, _forge_tensors, exact=False),
    "features": Target(_write_features, _read_features),
    "features, forged": Target(_write_features, _read_features, _forge_tensors, exact=False),
    "fisher": Target(_write_fisher, _read_fisher),
    "fisher, forged": Target(_write_fisher, _read_fisher, _forge_tensors, exact=False),
    "store": Target(_write_store, _read_store, damage_pages),
    "store, edited": Target(_write_store, _read_store, edit_cells),
    "state": Target(_write_state, _read_state),
    "state, header": Target(_write_state, _read_state, _mutate_header),
    "state, forged": Target(_write_state, _read_state, _forge_tensors, exact=False),
    "picture": Target(_write_picture, _read_picture, exact=False),
    "array": Target(_write_array, _read_array, exact=False),
    "packed runs": Target(_write_packed, _read_packed),
    "packed recipe": Target(_write_packed_recipe, _read_packed_recipe, _mutate_text(STORED, toml=True)),
}
"""All targets by name."""
