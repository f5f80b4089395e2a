"""Runs of one recipe from several stores: what they ask for together, and what cannot stand in one table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ttvd.bench.spec import Member, Spec
from ttvd.bench.store.codec import to_json
from ttvd.bench.store.sheet import read_meaning

CHOICE = (
    "Nothing was written. Pack into another folder, or give --replace to keep only the runs that this store asks "
    "for"
)
_LONG = 60  # signs of a value in a message


def check_same_recipe(here: str, there: str, path: Path) -> None:
    """Refuse to mix the runs of two recipes that have the same name.

    Args:
        here: TOML of the store.
        there: TOML beside the file.
        path: The file.

    Raises:
        ValueError: They ask for something else; the message names the entries that differ.
    """
    ours, theirs = (_flatten(read_meaning(text, path.stem)) for text in (here, there))
    if odd := _list_differences(ours, theirs):
        raise ValueError(
            f"the recipe {path.stem} of this store is not the one of {path.with_suffix('.toml')}: {odd}. {CHOICE}"
        )


def unite_members(here: Sequence[Member], there: Sequence[Member], path: Path) -> list[Member]:
    """What two stores ask for together under one recipe: their seeds add up.

    Args:
        here: Members of the store.
        there: Members of the file; they come first, in their order.
        path: The file.

    Raises:
        ValueError: The same place of a table would hold runs that differ in more than their seeds, e.g. in their
            limit, since one store is a trial; the message names what differs.
    """
    known = {_find_place(member): member for member in there}
    for member in here:
        other = known.get(_find_place(member))
        if other is not None and (
            odd := _list_differences(_list_traits(member.spec), _list_traits(other.spec))
        ):
            raise ValueError(
                f"{path} holds other runs of this recipe than this store: {odd} (line {member.label!r}, "
                f"{member.spec.domain_label}). {CHOICE}"
            )
    have = {identify(member) for member in there}
    return [*there, *(member for member in here if identify(member) not in have)]


def identify(member: Member) -> str:
    """A text that two members share if they are the same run for the same purpose."""
    return to_json([_find_place(member), member.spec.key])


def _find_place(member: Member) -> str:
    """Where a run stands in the table of its recipe, whatever its seed."""
    domains = member.spec.document()["domains"]
    parts = [member.label, member.role, dict(member.varies), dict(member.condition)]
    return to_json([*parts, domains, member.spec.selection])


def _list_traits(spec: Spec) -> dict[str, Any]:
    """All that decides a run but its seed, parameters and options one by one."""
    document = spec.document()
    seed = document.pop("seed")
    if document["parameters"].get("seed") == seed:
        del document["parameters"]["seed"]
    return _flatten(document)


def _flatten(document: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of tables as ``table.entry``."""
    flat: dict[str, Any] = {}
    for name, value in document.items():
        flat |= (
            {f"{name}.{key}": item for key, item in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    return flat


def _list_differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """In words, the entries that differ; empty where none does."""
    odd = [name for name in sorted({*here, *there}) if repr(here.get(name)) != repr(there.get(name))]
    return ", ".join(f"{name} is {_show(there, name)} there and {_show(here, name)} here" for name in odd)


def _show(entries: Mapping[str, Any], name: str) -> str:
    value = entries.get(name)
    text = "not given" if value is None else repr(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."
