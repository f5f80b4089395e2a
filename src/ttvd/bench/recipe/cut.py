"""Recipes cut down for a trial: fewer images, other seeds, some of the lines."""

from collections.abc import Sequence
from dataclasses import replace

from ttvd.bench.recipe.parts import Recipe
from ttvd.bench.recipe.planning import list_entries


def cut_limit(recipe: Recipe, limit: int) -> Recipe:
    """The recipe on so many images of its set."""
    data, oracle = replace(recipe.data, limit=limit), replace(recipe.oracle, limit=None)
    return replace(recipe, data=data, oracle=oracle)


def cut_seeds(recipe: Recipe, seeds: tuple[int, ...]) -> Recipe:
    """The recipe with these seeds, for all of its lines."""
    methods = tuple(replace(part, seeds=None) for part in recipe.methods)
    return replace(recipe, seeds=seeds, oracle=replace(recipe.oracle, seeds=None), methods=methods)


def cut_lines(recipe: Recipe, labels: Sequence[str]) -> Recipe:
    """The recipe with the lines that are called so; its reference is compared with if it is one of them.

    Raises:
        ValueError: A line is not there; the message has those that are.
    """
    entries = list_entries(recipe)
    there = [entry.label for entry in entries]
    if unknown := [label for label in labels if label not in there]:
        raise ValueError(f"recipe {recipe.name} has no line {unknown[0]!r}; it has: {', '.join(there)}")
    kept = [entry for entry in entries if entry.label in labels]
    has = {name for entry in kept for name in entry.method.parameters()}
    return replace(
        recipe,
        methods=tuple(replace(entry.part, name=(entry.method.name,), label=entry.label) for entry in kept),
        reference=recipe.reference if recipe.reference in labels else None,
        # What none of them takes was meant for others, and is no mistake here.
        params={name: value for name, value in recipe.params.items() if name in has},
        grid={name: values for name, values in recipe.grid.items() if name in has},
    )
