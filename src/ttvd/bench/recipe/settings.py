"""Whether the settings of a recipe fit its methods and its order, and where its models and data were looked for."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttvd.bench.job import ORDERS
from ttvd.bench.recipe.kinds import hint_at_quotes, is_number, is_whole
from ttvd.bench.recipe.parts import Recipe

if TYPE_CHECKING:
    from ttvd.bench.recipe.planning import Entry


def check_settings(recipe: Recipe, entries: "Iterable[Entry]") -> None:
    """Refuse parameters that no method takes, and values that are not of the kind of the default.

    Raises:
        ValueError: With the name, what was expected and what came.
    """
    known: set[str] = set()
    for entry in entries:
        defaults = entry.method.parameters()
        known |= set(defaults)
        pairs = [*entry.fixed.items(), *((name, v) for name, values in entry.grid.items() for v in values)]
        for name, value in pairs:
            if not (entry.method.takes_both(name) and (is_number(value) or isinstance(value, str))):
                _check_value(f"recipe {recipe.name}, line {entry.label!r}", name, value, defaults[name])
    for part, table in (("params", recipe.params), ("grid", recipe.grid)):
        for name in table:
            if name not in known:
                near = difflib.get_close_matches(name, sorted(known), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else "; `ttvd methods NAME` lists a method's"
                raise ValueError(
                    f"recipe {recipe.name}: no method of it has the parameter [{part}] {name}{hint}"
                )
    for order in recipe.stream.order:
        options = ORDERS[order].__kwdefaults__ or {}
        for name, values in recipe.stream.options.items():
            for value in values:
                # Their whole numbers are often the round values of real ones.
                loose = float(options[name]) if is_number(options[name]) else options[name]
                _check_value(f"recipe {recipe.name}, [stream]", name, value, loose)


def _check_value(where: str, name: str, value: Any, default: Any) -> None:
    words = ""
    if isinstance(default, bool):
        words = "" if isinstance(value, bool) else "true or false"
    elif isinstance(default, int):
        words = "" if is_whole(value) else "a whole number"
    elif isinstance(default, float):
        words = "" if is_number(value) else "a number"
    elif isinstance(default, str):
        words = "" if isinstance(value, str) else "a text in quotation marks"
    if words:
        raise ValueError(
            f"{where}: {name} must be {words}, such as {_show(default)}, got {value!r}{hint_at_quotes(words, value)}"
        )


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


@contextmanager
def looking_for(recipe: Recipe, what: str, folder: Path | None, option: str, usual: str) -> Iterator[None]:
    """Add to errors inside which recipe it is, where its models or data were looked for, and how to say otherwise."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        place = usual if folder is None else str(folder)
        text = (
            f"recipe {recipe.name}: {error} ({what} are looked for in {place}; {option} FOLDER names another)"
        )
        kind = FileNotFoundError if isinstance(error, OSError) else ValueError
        raise kind(text) from error
