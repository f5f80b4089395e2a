"""What reports ask of finished runs, wherever these are kept: in a store, or packed in a file."""

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Protocol

from ttvd.bench.spec import Member, Run
from ttvd.bench.store.values import Failure, Figure, Summary


class Reader(Protocol):
    """Finished runs and the recipes that asked for them; every method as ``Store`` has it."""

    path: Path

    def recipes(self) -> dict[str, str]:
        """Names of the recipes and their TOML."""

    def members(self, recipe: str) -> list[Member]:
        """What a recipe asks for."""

    def done(self) -> set[str]:
        """Keys of the finished runs."""

    def load(self, keys: Iterable[str]) -> dict[str, Run]:
        """Finished runs."""

    def summaries(self) -> list[Summary]:
        """All finished runs without their rows."""

    def failures(self) -> list[Failure]:
        """Runs that failed."""

    def claimed(self) -> set[str]:
        """Keys of the runs that are being done."""

    def figures(self, recipe: str) -> list[Figure]:
        """Figures of a recipe."""

    def find(self, prefix: str) -> str:
        """The key that begins so."""


def pick_key(keys: Sequence[str], prefix: str, path: Path) -> str:
    """The only one of the keys that begin with a prefix.

    Raises:
        ValueError: There is none, or there are several.
    """
    if not keys:
        raise ValueError(f"no run in {path} has a key that begins with {prefix!r}; `ttvd runs` lists them")
    if len(keys) > 1:
        some = ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")
        raise ValueError(f"{len(keys)} runs have keys that begin with {prefix!r}: {some}; give more digits")
    return keys[0]


def check_recipe(recipe: str, known: Iterable[str], path: Path) -> None:
    """Refuse the name of a recipe that is not there.

    Raises:
        ValueError: With the nearest name, or all of them.
    """
    names = list(known)
    if recipe not in names:
        near = difflib.get_close_matches(recipe, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names) or 'none'}"
        raise ValueError(f"no recipe {recipe!r} in {path}; {hint}")


def check_name(name: str) -> None:
    """Refuse the name of a recipe that could lead out of a folder: files are called like it.

    Raises:
        ValueError: It is not a plain name.

    Example:
        >>> check_name("table1-cifar10")
    """
    if {PurePosixPath(name).name, PureWindowsPath(name).name} != {name} or not name.strip(". "):
        raise ValueError(f"a recipe is called like a file, without folders; {name!r} is no such name")
