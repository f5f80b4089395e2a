"""From TOML to a recipe; every entry is checked, and a misspelt one is answered with the nearest."""

import difflib
import json
import os
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from ttvd.bench.recipe.kinds import check_kinds
from ttvd.bench.recipe.parts import (
    NEEDS,
    RULES,
    DataPart,
    FigurePart,
    MethodPart,
    OraclePart,
    Recipe,
    StreamPart,
)
from ttvd.bench.spec import CLEAN, Precision
from ttvd.data.corruptions import CORRUPTIONS, EXTRA

T = TypeVar("T")


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Read a recipe.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not TOML, or an entry is unknown or of the wrong kind.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no recipe at {file}; those of the repository are in recipes/")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a text file: {error}") from error
    return parse_recipe(text, file.stem)


def parse_recipe(text: str, name: str) -> Recipe:
    """The recipe that a text holds.

    Example:
        >>> text = 'title = "One line"\\ndata.set = "digits"\\n[[methods]]\\nname = "bn"'
        >>> parse_recipe(text, "one").methods[0].name
        ('bn',)
    """
    where = f"recipe {name}"
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is not TOML: {error}") from error
    reader = _Reader(where)
    reader.check_finite(document)
    if isinstance(sources := document.get("checkpoints"), dict):
        reader.check_among(sources, ("plain", *NEEDS), "checkpoints")
    check_kinds(document, where)
    reader.check_names(document, Recipe)
    document |= {"name": name, "text": text, "title": document.get("title", name)}
    for part in ("data", "methods"):
        if not document.get(part):
            raise ValueError(
                f"{where} needs a [{part}] part" if part == "data" else f"{where} has no [[methods]]"
            )
    document["data"] = reader.read_data(document["data"])
    document["methods"] = tuple(reader.read_method(entry) for entry in document["methods"])
    if "stream" in document:
        document["stream"] = reader.read_stream(document["stream"])
    if "oracle" in document:
        document["oracle"] = reader.read_oracle(document["oracle"])
    document["figures"] = tuple(reader.read_figure(entry) for entry in document.get("figures", []))
    document["grid"] = reader.read_grid(document.get("grid", {}))
    if "seeds" in document:
        document["seeds"] = reader.read_seeds(document["seeds"])
    if "sites" in document:
        document["sites"] = reader.read_shares(document["sites"])
    if "rules" in document:
        document["rules"] = _tuple(document["rules"])
    reader.check_rules(document.get("rules"))
    reader.check_among([document.get("precision", "float32")], get_args(Precision), "the list of precisions")
    return Recipe(**document)


@dataclass(frozen=True)
class _Reader:
    where: str

    def check_among(self, given: Iterable[str], allowed: Iterable[str], part: str) -> None:
        names = list(allowed)
        for name in given:
            if name not in names:
                near = difflib.get_close_matches(str(name), names, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(f"{self.where}: {part} has no {name!r}; {hint}Allowed: {', '.join(names)}")

    def check_finite(self, document: Any) -> None:
        try:
            json.dumps(document, allow_nan=False, default=str)
        except ValueError as error:
            raise ValueError(f"{self.where}: inf and nan cannot be values of a run") from error

    def check_whole(self, name: str, value: Any, least: int = 1, most: int | None = None) -> None:
        if type(value) is not int or value < least or (most is not None and value > most):
            bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"{self.where}: {name} must be a whole number {bounds}, got {value!r}")

    def check_names(self, table: Any, kind: type, part: str = "the recipe") -> None:
        if not isinstance(table, dict):
            raise ValueError(f"{self.where}: {part} must be a table of names and values, got {table!r}")
        hidden = {"name", "text"} if kind is Recipe else {"options"}
        self.check_among(
            table, [f.name for f in fields(kind) if f.name not in hidden or f.name in table], part
        )

    def build(self, kind: type[T], table: Any, part: str) -> T:
        self.check_names(table, kind, f"[{part}]")
        try:
            return kind(**table)
        except TypeError as error:
            raise ValueError(f"{self.where}: [{part}] is not complete: {error}") from error

    def read_data(self, table: Any) -> DataPart:
        from ttvd.data.sets import SETS

        part = self.build(DataPart, table, "data")
        self.check_among([part.set], SETS, "the list of data sets")
        if part.constants not in ("cifar", "imagenet"):
            raise ValueError(f"{self.where}: constants are 'cifar' or 'imagenet', got {part.constants!r}")
        self.check_whole("severity", part.severity, 1, 5)
        if part.limit is not None:
            self.check_whole("limit", part.limit)
        names = {key: self._read_corruptions(getattr(part, key)) for key in ("corruptions", "validation")}
        return replace(part, **names)  # type: ignore[arg-type]

    def read_oracle(self, table: Any) -> OraclePart:
        part = self.build(OraclePart, table, "oracle")
        self.check_whole("[oracle] steps", part.steps)
        if part.limit is not None:
            self.check_whole("[oracle] limit", part.limit)
        return part if part.seeds is None else replace(part, seeds=self.read_seeds(part.seeds))

    def read_seeds(self, value: Any) -> tuple[int, ...]:
        seeds = _tuple(value)
        for seed in seeds:
            self.check_whole("a seed", seed, 0)
        return seeds

    def read_shares(self, value: Any) -> tuple[float, ...]:
        shares = _tuple(value)
        if not all(0 < share <= 1 for share in shares):
            raise ValueError(f"{self.where}: sites are shares of the source data, in (0, 1], got {value!r}")
        return tuple(float(share) for share in shares)

    def _read_corruptions(self, value: Any) -> tuple[str, ...]:
        named = {"all": CORRUPTIONS, "extra": EXTRA}
        given = _tuple(value)
        self.check_among(given, (*CORRUPTIONS, *EXTRA, CLEAN, *named), "the list of corruptions")
        return tuple(dict.fromkeys(name for word in given for name in named.get(word, (word,))))

    def read_stream(self, table: Any) -> StreamPart:
        from ttvd.bench.job import ORDERS

        if not isinstance(table, dict):
            raise ValueError(f"{self.where}: [stream] must be a table, got {table!r}")
        known = ("order", "join", "batch_size")
        orders = _tuple(table.get("order", "iid"))
        self.check_among(orders, ORDERS, "the list of orders")
        join = table.get("join", "reset")
        self.check_among([join], ("reset", "continual", "mixed"), "the list of joins")
        options = {key: _tuple(value) for key, value in table.items() if key not in known}
        for order in orders:
            taken = ORDERS[order].__kwdefaults__ or {}
            self.check_among(options, taken, f"[stream] with order {order!r}")
        sizes = _tuple(table.get("batch_size", 64))
        if not all(isinstance(size, int) and size >= 1 for size in sizes):
            raise ValueError(f"{self.where}: batch_size must be whole numbers of at least 1, got {sizes}")
        return StreamPart(orders, join, sizes, options)

    def read_method(self, table: Any) -> MethodPart:
        part = self.build(MethodPart, table, "[methods]")
        rules = None if part.rules is None else _tuple(part.rules)
        self.check_rules(rules)
        return replace(
            part,
            name=_tuple(part.name),
            grid=self.read_grid(part.grid),
            rules=rules,
            seeds=None if part.seeds is None else self.read_seeds(part.seeds),
        )

    def read_figure(self, table: Any) -> FigurePart:
        if not isinstance(table, dict) or "kind" not in table:
            raise ValueError(f"{self.where}: [[figures]] needs a kind, got {table!r}")
        return FigurePart(table["kind"], {key: value for key, value in table.items() if key != "kind"})

    def read_grid(self, table: Any) -> dict[str, tuple[Any, ...]]:
        if not isinstance(table, dict) or not all(isinstance(v, list) and v for v in table.values()):
            raise ValueError(f"{self.where}: a grid gives a list of values for each parameter, got {table!r}")
        return {key: tuple(values) for key, values in table.items()}

    def check_rules(self, rules: Iterable[str] | None) -> None:
        self.check_among(rules or (), RULES, "the list of rules")


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
