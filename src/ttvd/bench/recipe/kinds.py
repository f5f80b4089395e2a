"""Of what kind each entry of a recipe must be, checked before anything is made of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True)
class Kind:
    """What an entry may be.

    Attributes:
        words: For messages: "... must be {words}".
        fits: Whether a single value is of this kind.
        many: Whether a list of such values will do as well.
    """

    words: str
    fits: Callable[[Any], bool]
    many: bool = False


def is_number(value: Any) -> bool:
    """Whether a value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


TEXT = Kind("a text in quotation marks", lambda value: isinstance(value, str))
TEXTS = Kind("a text in quotation marks or a list of them", TEXT.fits, many=True)
WHOLE = Kind("a whole number", is_whole)
WHOLES = Kind("a whole number or a list of them", is_whole, many=True)
NUMBERS = Kind("a number or a list of them", is_number, many=True)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TABLE = Kind("a table of names and values", lambda value: isinstance(value, dict))
VALUES = Kind("a value or a list of values", lambda value: not isinstance(value, list), many=True)

_PARTS: Mapping[str, Mapping[str, Kind]] = {
    "data": {
        "set": TEXT, "corruptions": TEXTS, "severity": WHOLE, "constants": TEXT, "limit": WHOLE, "validation": TEXTS,
    },
    "stream": {"order": TEXTS, "join": TEXT, "batch_size": WHOLES},
    "oracle": {"steps": WHOLE, "episodic": FLAG, "limit": WHOLE, "seeds": WHOLES},
    "methods": {
        "name": TEXTS, "label": TEXT, "checkpoint": TEXT, "views": WHOLE, "params": TABLE, "grid": TABLE,
        "rules": VALUES, "seeds": WHOLES, "episodic": FLAG,
    },
    "figures": {"kind": TEXT},
}  # fmt: skip
_TOP: Mapping[str, Kind] = {
    "title": TEXT, "note": TEXT, "reference": TEXT, "rules": VALUES, "seeds": WHOLES, "sites": NUMBERS,
    "precision": TEXT, "checkpoints": TABLE, "params": TABLE, "grid": TABLE,
}  # fmt: skip
_NOUNS = {"seeds": "whole numbers", "corruptions": "names", "name": "names"}
_REPEATED = ("methods", "figures")
_NEEDED = {"data": ("set", "a data set"), "methods": ("name", "a method")}


def check_kinds(document: Mapping[str, Any], where: str) -> None:
    """Refuse entries of the wrong kind; names that are not known are left to others.

    Args:
        document: A recipe as TOML gives it.
        where: Which one, for messages.

    Raises:
        ValueError: An entry is of the wrong kind, a list is empty or has something twice, or a part lacks its name.
    """
    if not document:
        raise ValueError(
            f"{where} is empty; it needs at least [data] with a set and [[methods]] with a name, as in "
            "recipes/smoke.toml"
        )
    for name in ("name", "text"):
        if name in document:
            raise ValueError(f"{where}: the recipe has no {name!r}; it is called like its file")
    for name, kind in _TOP.items():
        if name in document:
            _check(where, name, document[name], kind)
    for name, model in (document.get("checkpoints") or {}).items():
        _check(where, f"[checkpoints] {name}", model, TEXT)
    for part in _PARTS:
        if part in document:
            _check_part(where, part, document[part])
    _check_grid(where, document.get("grid", {}))


def _check_part(where: str, part: str, value: Any) -> None:
    title = f"[[{part}]]" if part in _REPEATED else f"[{part}]"
    if part in _REPEATED and not (
        isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
    ):
        _refuse(where, part, f"made of tables under {title}, with double brackets", value)
    if part not in _REPEATED and not isinstance(value, dict):
        _refuse(where, title, TABLE.words, value)
    for table in value if part in _REPEATED else [value]:
        key, noun = _NEEDED.get(part, ("", ""))
        if key and key not in table:
            raise ValueError(f"{where}: {title} is not complete: it needs {key} = the name of {noun}")
        for name, entry in table.items():
            kind = VALUES if part == "stream" else None  # the options of an order
            kind = _PARTS[part].get(name, kind)
            if kind is not None:
                _check(where, f"{title} {name}", entry, kind)
        _check_grid(where, table.get("grid", {}))


def _check_grid(where: str, table: Mapping[str, Any]) -> None:
    for name, values in table.items():
        if isinstance(values, list):
            _check_twice(where, f"grid {name}", values)


def _check(where: str, name: str, value: Any, kind: Kind) -> None:
    several = kind.many and isinstance(value, list)
    if several and not value:
        clean = '; "none" stands for clean images' if name.endswith("corruptions") else ""
        raise ValueError(f"{where}: {name} is empty; give it at least one value, or leave it out{clean}")
    for single in value if several else [value]:
        if not kind.fits(single):
            _refuse(where, name, kind.words, value)
    if several:
        _check_twice(where, name, value)


def _check_twice(where: str, name: str, values: list[Any]) -> None:
    seen = [repr(value) for value in values]
    for value in values:
        if seen.count(repr(value)) > 1:
            raise ValueError(
                f"{where}: {name} has {value!r} twice; give different {_NOUNS.get(name.split()[-1], 'values')}"
            )


def _refuse(where: str, name: str, words: str, value: Any) -> NoReturn:
    raise ValueError(f"{where}: {name} must be {words}, got {value!r}{hint_at_quotes(words, value)}")


def hint_at_quotes(words: str, value: Any) -> str:
    """What to say of a number, or of true or false, that came as a text.

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
