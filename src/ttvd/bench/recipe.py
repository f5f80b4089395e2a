"""Recipes: small TOML files that say what differs from the defaults. Every entry is checked when a file is read.

The classes are pydantic models, one for each table of a recipe. Messages name the recipe and the entry, what was
expected and what came; an unknown name is answered with the nearest known one.
"""

import dataclasses
import difflib
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from ttvd.bench.spec import CLEAN, JOINS, ORDERS, Join, Precision, is_own_code
from ttvd.data.corruptions import CORRUPTIONS, EXTRA, GROUPS
from ttvd.data.sets import SETS
from ttvd.methods import Method, find_method, list_methods
from ttvd.zoo.catalog import is_function

Rule = Literal["last", "grid-best", "validation", "oracle"]
RULES: tuple[Rule, ...] = get_args(Rule)
_LARGEST = 2**63 - 1  # what a store can hold
NEEDS = ("rotation head", "instance-aware norm", "sites")
"""Entries of ``Method.needs`` that choose a source model, the most specific first."""


def _as_tuple(value: Any) -> Any:
    """Turn a list of TOML, or a single value, into a tuple; refuse lists that are empty or have a value twice."""
    if isinstance(value, tuple):
        return value
    if not isinstance(value, list):
        return (value,)
    if not value:
        raise ValueError("is empty; give it at least one value, or leave it out")
    return _check_distinct(value)


def _check_distinct(values: list[Any]) -> tuple[Any, ...]:
    seen: set[str] = set()
    for value in values:
        if repr(value) in seen:
            raise ValueError(f"has {value!r} twice; give different values")
        seen.add(repr(value))
    return tuple(values)


def _as_grid_values(value: Any) -> Any:
    if isinstance(value, tuple):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"must be a list of values to try, got {value!r}")
    return _check_distinct(value)


def _one_of(allowed: Iterable[str]) -> Callable[[str], str]:
    names = tuple(allowed)

    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"{value!r} is unknown; {suggest(value, names)}")
        return value

    return check


def suggest(value: object, allowed: Iterable[str]) -> str:
    """Say which allowed name is the nearest to an unknown one, and which are allowed.

    Example:
        >>> suggest("fogg", ["fog", "snow"])
        "did you mean 'fog'? Allowed: fog, snow"
    """
    names = list(allowed)
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}Allowed: {', '.join(names) or 'none'}"


def _expand_groups(names: tuple[str, ...]) -> tuple[str, ...]:
    check = _one_of((*GROUPS["every"], CLEAN, *GROUPS))
    return tuple(dict.fromkeys(name for word in names for name in GROUPS.get(check(word), (word,))))


def _check_needs(checkpoints: Mapping[str, str]) -> Mapping[str, str]:
    for need in checkpoints:
        if need not in ("plain", *NEEDS):
            raise ValueError(f"has no {need!r}; {suggest(need, ('plain', *NEEDS))}")
    return checkpoints


Count: TypeAlias = Annotated[StrictInt, Field(ge=1, le=_LARGEST)]
Seed: TypeAlias = Annotated[StrictInt, Field(ge=0, le=_LARGEST)]
Seeds: TypeAlias = Annotated[tuple[Seed, ...], BeforeValidator(_as_tuple)]
Texts: TypeAlias = Annotated[tuple[StrictStr, ...], BeforeValidator(_as_tuple)]
Values: TypeAlias = Annotated[tuple[Any, ...], BeforeValidator(_as_tuple)]
Rules: TypeAlias = Annotated[tuple[Rule, ...], BeforeValidator(_as_tuple)]
Corruptions: TypeAlias = Annotated[Texts, AfterValidator(_expand_groups)]
Grid: TypeAlias = Mapping[str, Annotated[tuple[Any, ...], BeforeValidator(_as_grid_values)]]
Severity: TypeAlias = Annotated[StrictInt, Field(ge=1, le=5)]
Fraction: TypeAlias = Annotated[StrictFloat, Field(gt=0, le=1)]
_CONFIG = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_CONFIG)
class DataPart:
    """``[data]``: the images and their corruptions.

    Data sets, by what the folder of ``--data`` must hold:

    - ``digits`` needs no files. ``cifar10``, ``cifar100``, ``mnist``, ``fashion-mnist`` and ``imagenet`` (folders
      ``train`` and ``val``) are the official sets. Corruptions are generated.
    - ``cifar10-c``, ``cifar100-c``, ``mnist-c``, ``imagenet-c`` are the released corrupted images. ``stack`` is a
      folder of one's own in the layout of CIFAR-10-C: ``labels.npy``, and an array for each corruption such as
      ``fog.npy``, severity after severity.
    - ``imagenet-r`` shows a part of ImageNet's classes.
    - ``arrays`` is ``images.npz`` with the arrays ``images`` and ``labels``, or ``images.npy`` and ``labels.npy``.
    - ``folder`` is a folder of pictures for each class; pictures are resized to 256 and cropped to 224 pixels.

    ``arrays``, ``folder`` and ``stack`` have test images only. Methods that need sites then need a checkpoint with
    sites beside it, and methods that need features or Fisher information cannot be run. For the other sets these are
    computed from the training images: of ``cifar10`` for ``cifar10-c``, and so on.

    Attributes:
        set: Name of the data set.
        corruptions: Names of corruptions. ``"all"`` stands for the 15 of the usual tables, ``"extra"`` for the other 4,
            ``"every"`` for all 19, ``"none"`` for clean images.
        severity: Severity of the corruptions, 1 to 5.
        severities: Severities of single corruptions, where they differ.
        constants: Table of the generated corruptions, ``"cifar"`` or ``"imagenet"``.
        limit: Number of images that are used, a fixed random choice; all unless given.
        validation: Corruptions that choose parameters under the rule ``validation``.
    """

    set: Annotated[StrictStr, AfterValidator(_one_of(SETS))]
    corruptions: Corruptions = CORRUPTIONS
    severity: Severity = 5
    severities: Mapping[str, Severity] = field(default_factory=dict)
    constants: Literal["cifar", "imagenet"] = "cifar"
    limit: Count | None = None
    validation: Corruptions = EXTRA

    def __post_init__(self) -> None:
        used = (*self.corruptions, *self.validation)
        for name in self.severities:
            if name not in used:
                raise ValueError(f"has no corruption {name!r} to give a severity; {suggest(name, used)}")


@dataclass(frozen=True, config=_CONFIG)
class StreamPart:
    """``[stream]``: how the images arrive. A list of values makes a column of the table for each value.

    Attributes:
        order: Name of the order.
        join: ``"reset"``: each corruption is a run of its own. ``"continual"`` and ``"mixed"``: all corruptions are in
            one run, one after the other or mixed in each batch. ``"recurring"``: one after the other, over and over, in
            ``rounds`` rounds. ``"onset"``: each corruption is a run that begins and ends with clean images; ``lengths``
            has the batches of the three parts, or ranges to draw them from. ``"rare"``: each corruption is a run of
            clean images in which one batch in ``every`` is corrupted.
        batch_size: Number of images in a batch.
        options: Options of the order and of the join, such as ``alpha``. In the file they stand in ``[stream]`` itself.
    """

    order: Annotated[Texts, AfterValidator(lambda names: tuple(map(_one_of(ORDERS), names)))] = ("iid",)
    join: Literal["reset", Join] = "reset"
    batch_size: Annotated[tuple[Count, ...], BeforeValidator(_as_tuple)] = (64,)
    options: Mapping[str, Values] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for order in self.order:
            allowed = self.allowed_options(order)
            for name in self.options:
                if name not in allowed:
                    joined = "" if self.join == "reset" else f" and join {self.join!r}"
                    raise ValueError(
                        f"with order {order!r}{joined} has no {name!r}; {suggest(name, allowed)}"
                    )

    def allowed_options(self, order: str) -> dict[str, Any]:
        """Return the options that an order and the join have, with their defaults."""
        # Whole defaults of an order's options are often the round values of real numbers.
        usual = {
            name: float(value) if type(value) is int else value
            for name, value in (ORDERS[order].__kwdefaults__ or {}).items()
        }
        return usual if self.join == "reset" else {**usual, **JOINS[self.join]}


@dataclass(frozen=True, config=_CONFIG)
class OraclePart:
    """``[oracle]``: settings of the rule ``oracle``.

    Attributes:
        steps: Number of steps that are tried on each batch.
        episodic: Whether the adapter is reset before each batch.
        limit: Number of images that are used; that of ``[data]`` unless given.
        seeds: Seeds of a line for which the oracle is run; all of them unless given.
    """

    steps: Count = 10
    episodic: StrictBool = True
    limit: Count | None = None
    seeds: Seeds | None = None


@dataclass(frozen=True, config=_CONFIG)
class MethodPart:
    """``[[methods]]``: one line of the table, or several lines with the same settings.

    Attributes:
        name: Name of a registered method, a list of names, or ``"*"`` for all methods.
        label: Label in the table; the name of the method unless given.
        checkpoint: Source model; chosen by what the method needs unless given.
        views: Number of views that are aggregated around a method that handles no views itself.
        params: Fixed parameters.
        grid: Values to try for each parameter.
        rules: Rules of selection for this line; those of the recipe unless given.
        seeds: Seeds of this line; those of the recipe unless given.
        episodic: Whether the adapter is reset before each batch.
    """

    name: Texts
    label: StrictStr | None = None
    checkpoint: StrictStr | None = None
    views: Count = 1
    params: Mapping[str, Any] = field(default_factory=dict)
    grid: Grid = field(default_factory=dict)
    rules: Rules | None = None
    seeds: Seeds | None = None
    episodic: StrictBool = False


@dataclass(frozen=True, config=_CONFIG)
class FigurePart:
    """``[[figures]]``: a figure that is computed from a model.

    Attributes:
        kind: Kind of the figure, one of ``ttvd.bench.figures.KINDS``.
        options: Options of this kind. In the file they stand beside ``kind``.
    """

    kind: StrictStr
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, config=_CONFIG)
class Recipe:
    """A recipe: the data, the lines of its table, and how settings are chosen.

    Attributes:
        name: Name of the file without its suffix.
        text: The file as it was read.
        title: Title of the table; the name unless given.
        data: The images.
        methods: The lines of the table.
        note: A paragraph for the report.
        rules: Rules of selection; ``last`` where nothing is searched, unless given.
        reference: Label of the line that the others are compared with; the last line unless given.
        seeds: Seeds of order and method.
        stream: How the images arrive.
        checkpoints: Source model by need: ``plain``, ``sites``, ``"rotation head"``, ``"instance-aware norm"``.
        params: Fixed parameters for all methods that have them.
        grid: Values to try, for all methods that have such parameters.
        sites: Fractions of the source data from which class means are estimated.
        precision: ``"float32"``, or ``"bfloat16"``: faster on GPUs, equal within the noise of a seed.
        oracle: Settings of the rule ``oracle``.
        figures: Figures that are computed from a model.
    """

    name: StrictStr
    text: StrictStr
    title: StrictStr
    data: DataPart
    methods: tuple[MethodPart, ...]
    note: StrictStr = ""
    rules: Rules | None = None
    reference: StrictStr | None = None
    seeds: Seeds = (0,)
    stream: StreamPart = field(default_factory=StreamPart)
    checkpoints: Annotated[Mapping[str, StrictStr], AfterValidator(_check_needs)] = field(
        default_factory=dict
    )
    params: Mapping[str, Any] = field(default_factory=dict)
    grid: Grid = field(default_factory=dict)
    sites: Annotated[tuple[Fraction, ...], BeforeValidator(_as_tuple)] = (1.0,)
    precision: Precision = "float32"
    oracle: OraclePart = field(default_factory=OraclePart)
    figures: tuple[FigurePart, ...] = ()


_RECIPE = TypeAdapter(Recipe)
_PARTS = {
    "data": DataPart,
    "stream": StreamPart,
    "oracle": OraclePart,
    "methods": MethodPart,
    "figures": FigurePart,
}
_REPEATED = ("methods", "figures")


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Read a recipe from a file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not TOML, or an entry is unknown or of the wrong kind.
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
    """Read a recipe from a text.

    Args:
        text: TOML.
        name: Name of the recipe, for tables, stores and messages.

    Example:
        >>> text = 'title = "One line"\\ndata.set = "digits"\\n[[methods]]\\nname = "bn"'
        >>> parse_recipe(text, "one").methods[0].name
        ('bn',)
    """
    where = f"recipe {name}"
    document = _load_toml(text, where)
    if not document:
        raise ValueError(
            f"{where} is empty; it needs at least [data] with a set and [[methods]] with a name, as in "
            "recipes/smoke.toml"
        )
    for hidden in ("name", "text"):
        if hidden in document:
            raise ValueError(f"{where}: the recipe has no {hidden!r}; it is called like its file")
    for part in ("stream", "figures"):
        if part in document:
            document[part] = _gather_options(part, document[part])
    try:
        recipe: Recipe = _RECIPE.validate_python({"title": name, **document, "name": name, "text": text})
    except ValidationError as error:
        raise ValueError(f"{where}{_explain(error, document)}") from error
    if not recipe.methods:
        raise ValueError(f"{where} has no [[methods]]")
    return recipe


def _load_toml(text: str, where: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(text)
        json.dumps(document, allow_nan=False)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is not TOML: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply; a recipe has tables of values and lists") from error
    except TypeError as error:
        raise ValueError(f"{where}: dates and times cannot be values of a run") from error
    except ValueError as error:
        raise ValueError(f"{where}: inf and nan cannot be values of a run") from error
    return document


def _gather_options(part: str, value: Any) -> Any:
    """Move the entries of a table that are not fields of its part into ``options``."""
    if isinstance(value, list):
        return [_gather_options(part, entry) for entry in value]
    if not isinstance(value, dict):
        return value
    known = {item.name for item in fields(_PARTS[part])} - {"options"}
    options = {name: entry for name, entry in value.items() if name not in known}
    return {name: entry for name, entry in value.items() if name in known} | {"options": options}


_EXPECTED = {
    "string_type": "a text in quotation marks",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "dataclass_type": "a table of names and values",
    "mapping_type": "a table of names and values",
    "dict_type": "a table of names and values",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}
"""What pydantic expected, by the type of its error."""


def _explain(error: ValidationError, document: Mapping[str, Any]) -> str:
    """Say the first error of a recipe in the words of its file."""
    # A part that is missing altogether is told last.
    first = min(error.errors(), key=lambda found: found["type"] == "missing" and len(found["loc"]) == 1)
    kind, location, context = first["type"], first["loc"], first.get("ctx", {})
    table, name, value = _locate(location, document)
    place = f"{table} {name}".strip()
    if kind == "unexpected_keyword_argument":
        part = _PARTS[str(location[0])] if len(location) > 1 else Recipe
        hidden = ("name", "text") if part is Recipe else ("options",)
        allowed = [item.name for item in fields(part) if item.name not in hidden]
        return f": {table or 'the recipe'} has no {name!r}; {suggest(name, allowed)}"
    if kind == "missing" and len(location) == 1:
        return " has no [[methods]]" if location[0] == "methods" else f" needs a [{location[0]}] part"
    if kind == "missing":
        return f": {table} is not complete: it needs {name}"
    if kind == "literal_error":
        allowed = context["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        return f": {place} {first['input']!r} is unknown; {suggest(first['input'], allowed)}"
    if kind == "value_error":
        return f": {place} {context['error']}"
    if location[0] in _REPEATED and len(location) < 3:
        title = location[0]
        return f": {title} must be made of tables under [[{title}]], with double brackets, got {document[title]!r}"
    words = _EXPECTED.get(kind, first["msg"]).format(**context)
    if isinstance(location[-1], int) and kind.endswith("_type"):
        words += " or a list of them"
    return f": {place} must be {words}, got {value!r}{hint_at_quotes(words, value)}"


def _locate(location: tuple[int | str, ...], document: Any) -> tuple[str, str, Any]:
    """Find the table, the name and the value of an entry. For a value in a list it is the list."""
    table, names, value = "", [], document
    for depth, step in enumerate(location):
        if depth == 0 and step in _PARTS:
            table = f"[[{step}]]" if step in _REPEATED else f"[{step}]"
        elif depth == 1 and location[0] in _REPEATED:
            table += f" (entry {int(step) + 1})" if len(value) > 1 else ""
        elif isinstance(step, int):
            break
        elif step != "options":
            names.append(str(step))
        with suppress(
            KeyError, TypeError
        ):  # an entry that is missing, or an option, which stands in its table
            value = value[step]
    if len(names) > 1:  # an entry of [params], [grid] or [checkpoints], or of such a table within a line
        names[0] = f"[{names[0]}]"
    return table, " ".join(names), value


def hint_at_quotes(words: str, value: Any) -> str:
    """Return the advice for a number, or true or false, that came as a text.

    Example:
        >>> hint_at_quotes("a whole number", "64")
        '; leave the quotation marks out'
    """
    if not isinstance(value, str) or "quotation" in words:
        return ""
    try:
        float(value)
    except ValueError:
        return "; leave the quotation marks out" if value.lower() in ("true", "false") else ""
    return "; leave the quotation marks out"


def check_code(recipe: Recipe, *, allow_code: bool) -> None:
    """Refuse a recipe that names code outside of ttvd, unless that is allowed. Nothing is imported here.

    Args:
        recipe: The recipe.
        allow_code: Whether ``package.module:Name`` in the recipe may be imported and run.

    Raises:
        ValueError: The recipe names code; the message has the entries.
    """
    if found := [] if allow_code else _list_code(recipe):
        raise ValueError(
            f"recipe {recipe.name} names code, which would be imported and run: {', '.join(found)}. If you trust this "
            "code, give --allow-code (in Python: WorkerConfig(allow_code=True))"
        )


def _list_code(recipe: Recipe) -> list[str]:
    """List the entries of a recipe that name code."""
    methods = [("[[methods]] name", name) for part in recipe.methods for name in part.name]
    models = [(f"[checkpoints] {need}", name) for need, name in recipe.checkpoints.items()]
    models += [("[[methods]] checkpoint", part.checkpoint or "") for part in recipe.methods]
    for part in recipe.figures:
        models.append(("[[figures]] checkpoint", str(part.options.get("checkpoint", ""))))
        if isinstance(named := part.options.get("methods"), Mapping):
            methods += [("[[figures]] methods", str(name)) for name in named.values()]
    found = [f"{place} {name!r}" for place, name in methods if is_own_code(name)]
    found += [f"{place} {name!r}" for place, name in models if is_function(name)]
    return list(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A line of a recipe's table, with all settings that apply to it.

    Attributes:
        label: Label in the table.
        method: The method.
        part: The ``[[methods]]`` table that the line comes from.
        checkpoint: Source model.
        fixed: Fixed parameters.
        grid: Values to try for each parameter.
        rules: Rules of selection.
    """

    label: str
    method: Method
    part: MethodPart
    checkpoint: str
    fixed: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]]
    rules: tuple[Rule, ...]


def list_entries(recipe: Recipe, *, allow_code: bool = False) -> list[Entry]:
    """Return the lines of a recipe's table.

    Args:
        recipe: The recipe.
        allow_code: Whether methods that the recipe names as ``package.module:Class`` may be imported.

    Raises:
        ValueError: A method or parameter is unknown, two lines have one label, the rules do not fit, or the recipe
            names code that is not allowed.
    """
    check_code(recipe, allow_code=allow_code)
    lines = list_lines(recipe).values()
    try:
        methods = [find_method(name) for _, name in lines]
    except ValueError as error:
        raise ValueError(f"recipe {recipe.name}: {error}") from error
    return [_make_entry(recipe, part, method) for (part, _), method in zip(lines, methods, strict=True)]


def list_lines(recipe: Recipe) -> dict[str, tuple[MethodPart, str]]:
    """Return the lines of a recipe's table by label: the part of the recipe and the name of the method.

    Code that the recipe names is not imported.

    Raises:
        ValueError: A method is unknown, or two lines have one label.
    """
    lines: dict[str, tuple[MethodPart, str]] = {}
    for part in recipe.methods:
        names = tuple(list_methods()) if part.name == ("*",) else part.name
        if part.label is not None and len(names) > 1:
            raise ValueError(
                f"recipe {recipe.name}: the label {part.label!r} cannot stand for {len(names)} methods"
            )
        for name in names:
            try:
                label = part.label or (name if is_own_code(name) else find_method(name).name)
            except ValueError as error:
                raise ValueError(f"recipe {recipe.name}: {error}") from error
            if label in lines:
                raise ValueError(
                    f"recipe {recipe.name}: two lines are called {label!r}; give one of them a label"
                )
            lines[label] = part, name
    if recipe.reference is not None and recipe.reference not in lines:
        raise ValueError(f"recipe {recipe.name}: no line is called {recipe.reference!r}, the reference")
    return lines


def _make_entry(recipe: Recipe, part: MethodPart, method: Method) -> Entry:
    allowed = method.parameters()
    # A recipe's own settings are for those methods that know them; a line's must fit.
    fixed = {name: value for name, value in recipe.params.items() if name in allowed} | dict(part.params)
    grid = {n: v for n, v in recipe.grid.items() if n in allowed and n not in part.params} | dict(part.grid)
    fixed = {name: value for name, value in fixed.items() if name not in grid}
    for name in (*fixed, *grid):
        if name not in allowed:
            raise ValueError(
                f"recipe {recipe.name}: {method.name} has no parameter {name!r}; {suggest(name, allowed)}"
            )
    rules = choose_rules(recipe, part, searched=bool(grid), steps=method.backwards > 0)
    if grid and "last" in rules:
        raise ValueError(
            f"recipe {recipe.name}: {method.name} has a grid; the rule 'last' needs one fixed setting. Use grid-best, "
            "validation or oracle, or give the line params = {...} without a grid"
        )
    checkpoint = _choose_checkpoint(recipe, part, method)
    return Entry(part.label or method.name, method, part, checkpoint, fixed, grid, rules)


def choose_rules(recipe: Recipe, part: MethodPart, *, searched: bool, steps: bool) -> tuple[Rule, ...]:
    """Return the rules of selection of a line.

    Args:
        recipe: The recipe.
        part: The ``[[methods]]`` table of the line.
        searched: Whether the line has a grid.
        steps: Whether the method takes gradient steps. Without them the oracle has none to choose.
    """
    usual: tuple[Rule, ...] = ("grid-best",) if searched else ("last",)
    rules = part.rules or recipe.rules or usual
    if not searched:  # one fixed setting, whatever the others do
        rules = tuple(dict.fromkeys("oracle" if rule == "oracle" else "last" for rule in rules))
    return rules if steps else tuple(rule for rule in rules if rule != "oracle") or usual


def _choose_checkpoint(recipe: Recipe, part: MethodPart, method: Method) -> str:
    if part.checkpoint is not None:
        return part.checkpoint
    found = [
        recipe.checkpoints[need] for need in NEEDS if need in method.needs and need in recipe.checkpoints
    ]
    if not found and "plain" not in recipe.checkpoints:
        raise ValueError(
            f"recipe {recipe.name}: {method.name} has no checkpoint; give the line one, or [checkpoints] a plain one"
        )
    return found[0] if found else recipe.checkpoints["plain"]


def cut_limit(recipe: Recipe, limit: int) -> Recipe:
    """Return the recipe with a limit on the number of images."""
    if not 1 <= limit <= _LARGEST:
        raise ValueError(f"limit must be a whole number from 1 to {_LARGEST}, got {limit}")
    data, oracle = replace(recipe.data, limit=limit), replace(recipe.oracle, limit=None)
    return replace(recipe, data=data, oracle=oracle)


def cut_seeds(recipe: Recipe, seeds: tuple[int, ...]) -> Recipe:
    """Return the recipe with other seeds, for all of its lines."""
    if not all(0 <= seed <= _LARGEST for seed in seeds):
        raise ValueError(f"seeds must be whole numbers from 0 to {_LARGEST}, got {seeds}")
    methods = tuple(replace(part, seeds=None) for part in recipe.methods)
    return replace(recipe, seeds=seeds, oracle=replace(recipe.oracle, seeds=None), methods=methods)


def set_params(recipe: Recipe, params: Mapping[str, Any]) -> Recipe:
    """Return the recipe with parameters for all methods that have them, in place of those of lines and grids.

    Example:
        >>> text = 'data.set = "digits"\\n[[methods]]\\nname = "tent"\\ngrid.lr = [0.1, 0.2]'
        >>> changed = set_params(parse_recipe(text, "one"), {"lr": 0.5})
        >>> dict(changed.params), dict(changed.methods[0].grid)
        ({'lr': 0.5}, {})
    """

    for name, value in params.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError as error:
            raise ValueError(f"parameter {name}: inf and nan cannot be values of a run") from error

    def without(table: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in table.items() if name not in params}

    methods = tuple(
        replace(part, params=without(part.params), grid=without(part.grid)) for part in recipe.methods
    )
    return replace(recipe, params={**recipe.params, **params}, grid=without(recipe.grid), methods=methods)


def cut_lines(recipe: Recipe, labels: Sequence[str], *, allow_code: bool = False) -> Recipe:
    """Return the recipe with some of its lines. Its reference stays if it is one of them.

    Raises:
        ValueError: A label is unknown (the message has those of the recipe), or the recipe names code that is not
            allowed.
    """
    entries = list_entries(recipe, allow_code=allow_code)
    known = [entry.label for entry in entries]
    if unknown := [label for label in labels if label not in known]:
        raise ValueError(f"recipe {recipe.name} has no line {unknown[0]!r}; it has: {', '.join(known)}")
    kept = [entry for entry in entries if entry.label in labels]
    has = {name for entry in kept for name in entry.method.parameters()}
    return replace(
        recipe,
        methods=tuple(replace(entry.part, name=(entry.method.name,), label=entry.label) for entry in kept),
        reference=recipe.reference if recipe.reference in labels else None,
        # A parameter that only other lines take is no mistake here.
        params={name: value for name, value in recipe.params.items() if name in has},
        grid={name: values for name, values in recipe.grid.items() if name in has},
    )
