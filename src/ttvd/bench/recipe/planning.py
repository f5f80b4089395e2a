"""From a recipe to its runs. A run that cannot work is found here, before the first one starts."""

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any, Literal

import torch

from ttvd.bench.fingerprints import check_method
from ttvd.bench.job import build_adapter, identify_adapter, make_order, to_plain
from ttvd.bench.recipe.parts import NEEDS, MethodPart, Recipe, Rule
from ttvd.bench.recipe.settings import check_settings, looking_for
from ttvd.bench.resources import CORRUPTED, OFFICIAL, Resources
from ttvd.bench.spec import Domain, Member, Spec
from ttvd.methods import Method, find_method, list_methods
from ttvd.methods.registry import prepare_model

# What only some method objects need of the source data takes long to make: not for a check.
_SLOW = frozenset({"features", "fisher"})


@dataclass(frozen=True)
class Entry:
    """A line of the table before it is spread over corruptions, seeds and settings."""

    label: str
    method: Method
    part: MethodPart
    checkpoint: str
    fixed: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]]
    rules: tuple[Rule, ...]


def list_entries(recipe: Recipe) -> list[Entry]:
    """The lines of a recipe's table, each with the settings that apply to it."""
    entries: list[Entry] = []
    for part in recipe.methods:
        names = tuple(list_methods()) if part.name == ("*",) else part.name
        if part.label is not None and len(names) > 1:
            raise ValueError(
                f"recipe {recipe.name}: the label {part.label!r} cannot stand for {len(names)} methods"
            )
        entries.extend(_make_entry(recipe, part, find_method(name)) for name in names)
    labels = [entry.label for entry in entries]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(
                f"recipe {recipe.name}: two lines are called {label!r}; give one of them a label"
            )
    if recipe.reference is not None and recipe.reference not in labels:
        raise ValueError(f"recipe {recipe.name}: no line is called {recipe.reference!r}, the reference")
    return entries


def _make_entry(recipe: Recipe, part: MethodPart, method: Method) -> Entry:
    has = method.parameters()
    # A recipe's own settings are for those methods that know them; a line's must fit.
    fixed = {name: value for name, value in recipe.params.items() if name in has} | dict(part.params)
    grid = {n: v for n, v in recipe.grid.items() if n in has and n not in part.params} | dict(part.grid)
    fixed = {name: value for name, value in fixed.items() if name not in grid}
    unknown = sorted({*fixed, *grid} - set(has))
    if unknown:
        raise ValueError(
            f"recipe {recipe.name}: {method.name} has no parameter {unknown[0]!r}; it takes: {', '.join(has) or 'none'}"
        )
    rules = part.rules or recipe.rules or (("grid-best",) if grid else ("last",))
    if not grid:  # nothing is searched: one fixed setting, whatever the others do
        rules = tuple(dict.fromkeys("oracle" if rule == "oracle" else "last" for rule in rules))
    elif "last" in rules:
        raise ValueError(
            f"recipe {recipe.name}: {method.name} has a grid; the rule 'last' needs one fixed setting. Use grid-best, "
            "validation or oracle, or give the line a params = {...} without a grid"
        )
    if method.backwards == 0:  # without steps there is none to choose
        rules = tuple(rule for rule in rules if rule != "oracle") or (("grid-best",) if grid else ("last",))
    return Entry(
        part.label or method.name, method, part, _choose_source(recipe, part, method), fixed, grid, rules
    )


def _choose_source(recipe: Recipe, part: MethodPart, method: Method) -> str:
    if part.checkpoint is not None:
        return part.checkpoint
    for need in NEEDS:
        if need in method.needs and need in recipe.checkpoints:
            return recipe.checkpoints[need]
    if "plain" not in recipe.checkpoints:
        raise ValueError(
            f"recipe {recipe.name}: {method.name} has no checkpoint; give the line one, or [checkpoints] a plain one"
        )
    return recipe.checkpoints["plain"]


def plan(recipe: Recipe, resources: Resources) -> list[Member]:
    """All runs that a recipe asks for, in the order in which they are best done.

    That is adapter by adapter, so that a worker builds few of them; but corruption by corruption where a worker cannot
    keep the images of all.

    Args:
        recipe: As :func:`~ttvd.bench.recipe.read_recipe` gives it.
        resources: Where models and data are found.

    Raises:
        ValueError: A method, parameter, model or data set does not fit; nothing has been run.
    """
    entries = list_entries(recipe)
    check_settings(recipe, entries)
    both = set(recipe.data.corruptions) & set(recipe.data.validation)
    if both and any("validation" in entry.rules for entry in entries):
        raise ValueError(
            f"recipe {recipe.name}: {sorted(both)[0]} is reported and chooses parameters too; take it out of "
            "[data] corruptions, or give [data] validation others"
        )
    members = list(_spread(recipe, entries, resources))
    _check_members(recipe, members, resources)
    specs = [member.spec for member in members]
    together = (identify_adapter, attrgetter("batch_size")) if resources.keeps_all(specs) else ()
    ranks = [_rank(map(kind, specs)) for kind in (*together, attrgetter("domains"))]
    ranked = sorted(zip(zip(*ranks, strict=True), members, strict=True), key=itemgetter(0))
    return [member for _, member in ranked]


def _rank(kinds: Iterable[Hashable]) -> list[int]:
    """For each item the place of its kind, in the order in which kinds come first."""
    places: dict[Hashable, int] = {}
    return [places.setdefault(kind, len(places)) for kind in kinds]


def _check_members(recipe: Recipe, members: Sequence[Member], resources: Resources) -> None:
    """Try once whatever may be wrong with some of the runs: their settings, their orders, what models say."""
    checked: set[tuple[Any, ...]] = set()
    for member in members:
        spec = member.spec
        together = spec.domains if len(spec.domains) > 1 else ()
        for check, of in (
            (_check_cell, (spec.method, spec.checkpoint, spec.views, spec.sites, repr(spec.parameters))),
            (make_order, (spec.stream, repr(spec.options), spec.limit, together)),
            (_check_outputs, (spec.method, spec.checkpoint, spec.views)),
        ):
            if (check, *of) not in checked:
                checked.add((check, *of))
                try:
                    check(spec, resources)
                except (ValueError, TypeError, RuntimeError) as error:
                    raise ValueError(f"recipe {recipe.name}, line {member.label!r}: {error}") from error


def _is_ready(spec: Spec, resources: Resources) -> bool:
    """Whether the adapter of a run can be built at once, without a pass over the source data."""
    needs = find_method(spec.method).needs
    has_sites = spec.sites == 1.0 and resources.source(spec.checkpoint).sites is not None
    return not needs & _SLOW and (has_sites or "sites" not in needs)


def _check_cell(spec: Spec, resources: Resources) -> None:
    check_method(spec, resources)
    if _is_ready(spec, resources):
        build_adapter(spec, resources)


def _check_outputs(spec: Spec, resources: Resources) -> None:
    """Show two images to the model: it must take them, and have an output for each class."""
    shown, restriction = resources.base(spec.data, spec.domains[0]), resources.restriction(spec.data)
    x = shown.floats(torch.arange(min(2, len(shown)))).to(resources.device)
    if _is_ready(spec, resources):
        outputs = build_adapter(spec, resources)(x).shape[1]
    elif "sites" in find_method(spec.method).needs:
        return  # it is known when there are sites, whose estimation compares labels and head
    else:
        with torch.no_grad():
            outputs = prepare_model(resources.source(spec.checkpoint), find_method(spec.method), spec.views)(
                x
            ).shape[1]
    if restriction is not None:
        classes, exact = restriction.outputs, True
    elif shown.classes is not None:
        # Of folders, labels are the places of those that are there: with some missing, they would be other classes.
        classes, exact = len(shown.classes), True
    else:
        classes, exact = int(shown.labels.max()) + 1, False
    if outputs < classes or (exact and outputs != classes):
        raise ValueError(f"{spec.checkpoint} tells {outputs} classes apart, {spec.data} needs {classes}")


def _spread(recipe: Recipe, entries: Sequence[Entry], resources: Resources) -> Iterator[Member]:
    """Every line over its settings, conditions, corruptions and seeds."""
    for entry, condition in itertools.product(entries, _list_conditions(recipe)):
        for values in itertools.product(*entry.grid.values()):
            varies = dict(zip(entry.grid, values, strict=True))
            base = _make_spec(recipe, entry, condition, {**entry.fixed, **varies}, resources)
            for role, spec in _list_runs(recipe, entry, base, resources):
                yield Member(recipe.name, entry.label, role, spec, varies, condition)


def _list_conditions(recipe: Recipe) -> list[dict[str, Any]]:
    """What the columns of the table differ in, beside the corruption."""
    stream = recipe.stream
    axes: dict[str, Sequence[Any]] = {
        "order": stream.order,
        "batch_size": stream.batch_size,
        **stream.options,
        "sites": recipe.sites,
    }
    lists = {name: values for name, values in axes.items() if len(values) > 1}
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def _make_spec(
    recipe: Recipe,
    entry: Entry,
    condition: Mapping[str, Any],
    parameters: Mapping[str, Any],
    resources: Resources,
) -> Spec:
    """What all runs of a line, a setting and a condition have in common."""
    stream = recipe.stream
    options = {name: condition.get(name, values[0]) for name, values in stream.options.items()}
    defaults = entry.method.parameters()
    chosen = {name: _to_kind(value, defaults[name]) for name, value in {**defaults, **parameters}.items()}
    share = condition.get("sites", recipe.sites[0]) if "sites" in entry.method.needs else 1.0
    with looking_for(recipe, "models", resources.setting.checkpoints, "--checkpoints", "the package"):
        weights = resources.weights(entry.checkpoint, entry.method, share, chosen)
    return Spec(
        checkpoint=entry.checkpoint,
        weights=weights,
        data=recipe.data.set,
        content="",
        domains=(),
        method=entry.method.name,
        revision=entry.method.revision,
        parameters=chosen,
        constants=OFFICIAL if recipe.data.set in CORRUPTED else recipe.data.constants,
        stream=condition.get("order", stream.order[0]),
        options=options,
        join="mixed" if stream.join == "mixed" else "continual",
        batch_size=condition.get("batch_size", stream.batch_size[0]),
        limit=recipe.data.limit,
        views=entry.part.views,
        sites=share,
        episodic=entry.part.episodic,
        precision=recipe.precision,
    )


def _to_kind(value: Any, default: Any) -> Any:
    """A parameter as JSON can hold it; 1 for 1.0 is the same run."""
    return float(value) if isinstance(default, float) and type(value) is int else to_plain(value)


def _list_runs(
    recipe: Recipe, entry: Entry, base: Spec, resources: Resources
) -> Iterator[tuple[Literal["test", "validation"], Spec]]:
    """The runs of a setting: those that are reported, and those that only choose."""
    specs = [base] if set(entry.rules) - {"oracle"} else []
    if "oracle" in entry.rules:
        oracle = recipe.oracle
        limit = base.limit if oracle.limit is None else oracle.limit
        specs.append(
            replace(base, selection="oracle", steps=oracle.steps, episodic=oracle.episodic, limit=limit)
        )
    for spec in specs:
        yield from (
            ("test", run) for run in _list_domains(recipe, entry, spec, recipe.data.corruptions, resources)
        )
    if "validation" in entry.rules:
        for run in _list_domains(recipe, entry, base, recipe.data.validation, resources):
            yield "validation", run


def _list_domains(
    recipe: Recipe, entry: Entry, spec: Spec, corruptions: Sequence[str], resources: Resources
) -> Iterator[Spec]:
    domains = tuple(Domain(name, recipe.data.severity) for name in corruptions)
    streams = [(domain,) for domain in domains] if recipe.stream.join == "reset" else [domains]
    seeds = entry.part.seeds or recipe.seeds
    if spec.selection == "oracle" and recipe.oracle.seeds is not None:
        seeds = tuple(seed for seed in seeds if seed in recipe.oracle.seeds)
        if not seeds:
            raise ValueError(
                f"recipe {recipe.name}, line {entry.label!r}: none of its seeds is one of [oracle]; give the line one "
                "of these, or rules without 'oracle'"
            )
    for seed, stream in itertools.product(seeds, streams):
        with looking_for(recipe, "data sets", resources.setting.data, "--data", "the working folder"):
            content = resources.content(spec.data, stream)
        parameters = dict(spec.parameters)
        if "seed" in parameters and "seed" not in {**entry.fixed, **entry.grid}:
            parameters["seed"] = seed
        yield replace(spec, domains=stream, content=content, seed=seed, parameters=parameters)
