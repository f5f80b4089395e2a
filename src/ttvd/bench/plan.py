"""From a recipe to its runs. What cannot work is refused here, before the first run starts."""

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import torch

from ttvd.bench.job import build_adapter, check_model, identify_adapter, make_order, to_plain
from ttvd.bench.recipe import Entry, Recipe, hint_at_quotes, list_entries, suggest
from ttvd.bench.resources import CORRUPTED, SOURCE_STATISTICS, Resources
from ttvd.bench.spec import CLEAN, FRESH, JOINS, OFFICIAL, WITH_CLEAN, Domain, Member, Role, Spec
from ttvd.methods.registry import prepare_model

_MOST_RUNS = 1_000_000  # of one recipe; grids multiply fast
_CHECKED_STEPS = 10  # on the images that are shown to a model before the first run


def plan(recipe: Recipe, resources: Resources) -> list[Member]:
    """Return all runs of a recipe, in the order in which they are best done.

    This order is adapter by adapter, so that a worker builds few of them. Where a worker cannot keep the images of all
    corruptions, it is corruption by corruption.

    Args:
        recipe: The recipe.
        resources: Models and data.

    Raises:
        ValueError: A method, parameter, model or data set does not fit. Nothing has been run.
    """
    entries = list_entries(recipe, allow_code=resources.config.allow_code)
    _check_parameters(recipe, entries)
    both = set(recipe.data.corruptions) & set(recipe.data.validation)
    if both and any("validation" in entry.rules for entry in entries):
        raise ValueError(
            f"recipe {recipe.name}: {sorted(both)[0]} is reported and chooses parameters too; take it out of "
            "[data] corruptions, or give [data] validation others"
        )
    _check_join(recipe)
    _check_count(recipe, entries)
    members = list(_list_members(recipe, entries, resources))
    _check_members(recipe, members, resources)
    specs = [member.spec for member in members]
    together = (identify_adapter, attrgetter("batch_size")) if resources.keeps_all(specs) else ()
    ranks = [_rank(map(kind, specs)) for kind in (*together, attrgetter("domains"))]
    ranked = sorted(zip(zip(*ranks, strict=True), members, strict=True), key=itemgetter(0))
    return [member for _, member in ranked]


def _rank(kinds: Iterable[Hashable]) -> list[int]:
    """Number kinds in the order in which they first appear, and return the number of each item's kind."""
    places: dict[Hashable, int] = {}
    return [places.setdefault(kind, len(places)) for kind in kinds]


# Runs


def _list_members(recipe: Recipe, entries: Sequence[Entry], resources: Resources) -> Iterator[Member]:
    """Each line with all its settings, conditions, corruptions and seeds."""
    for entry, condition in itertools.product(entries, _list_conditions(recipe)):
        for values in itertools.product(*entry.grid.values()):
            varies = dict(zip(entry.grid, values, strict=True))
            base = _make_spec(recipe, entry, condition, {**entry.fixed, **varies}, resources)
            for role, spec in _list_roles(recipe, entry, base, resources):
                yield Member(recipe.name, entry.label, role, spec, varies, condition)


def _list_conditions(recipe: Recipe) -> list[dict[str, Any]]:
    """What distinguishes the columns of the table, beside the corruption."""
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
    """What the runs of a line, a setting and a condition have in common."""
    stream = recipe.stream
    join = "continual" if stream.join == "reset" else stream.join
    given = {name: condition.get(name, values[0]) for name, values in stream.options.items()}
    defaults = entry.method.parameters()
    chosen = {name: _to_json(value, defaults[name]) for name, value in {**defaults, **parameters}.items()}
    fraction = condition.get("sites", recipe.sites[0]) if "sites" in entry.method.needs else 1.0
    with _naming_folder(recipe, "models", resources.config.checkpoints, "--checkpoints", "the package"):
        weights = resources.weights(entry.checkpoint, entry.method, fraction, chosen)
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
        options={**JOINS[join], **given},
        join=join,
        batch_size=condition.get("batch_size", stream.batch_size[0]),
        limit=recipe.data.limit,
        views=entry.part.views,
        sites=fraction,
        episodic=entry.part.episodic,
        precision=recipe.precision,
    )


def _to_json(value: Any, default: Any) -> Any:
    """A parameter as a JSON value; 1 and 1.0 give the same run."""
    return float(value) if isinstance(default, float) and type(value) is int else to_plain(value)


def _list_roles(
    recipe: Recipe, entry: Entry, base: Spec, resources: Resources
) -> Iterator[tuple[Role, Spec]]:
    """The runs of a setting: those that are reported, the fresh starts beside them, and those that only choose."""
    specs = [base] if set(entry.rules) - {"oracle"} else []
    if "oracle" in entry.rules:
        oracle = recipe.oracle
        limit = base.limit if oracle.limit is None else oracle.limit
        specs.append(
            replace(base, selection="oracle", steps=oracle.steps, episodic=oracle.episodic, limit=limit)
        )
    for spec in specs:
        for run in _list_streams(recipe, entry, spec, recipe.data.corruptions, resources):
            yield "test", run
            if run.join == "onset":
                yield "fresh", replace(run, options={**run.options, **FRESH})
    if "validation" in entry.rules:
        for run in _list_streams(recipe, entry, base, recipe.data.validation, resources):
            yield "validation", run


def _list_streams(
    recipe: Recipe, entry: Entry, spec: Spec, corruptions: Sequence[str], resources: Resources
) -> Iterator[Spec]:
    """The runs of a setting on all corruptions, with all seeds."""
    domains = tuple(
        Domain(name, recipe.data.severities.get(name, recipe.data.severity)) for name in corruptions
    )
    streams = [domains]
    if recipe.stream.join == "reset":
        streams = [(domain,) for domain in domains]
    elif recipe.stream.join in WITH_CLEAN:
        streams = [(Domain(CLEAN), domain) for domain in domains]
    seeds = entry.part.seeds or recipe.seeds
    if spec.selection == "oracle" and recipe.oracle.seeds is not None:
        seeds = tuple(seed for seed in seeds if seed in recipe.oracle.seeds)
        if not seeds:
            raise ValueError(
                f"recipe {recipe.name}, line {entry.label!r}: none of its seeds is one of [oracle]; give the line one "
                "of these, or rules without 'oracle'"
            )
    for seed, stream in itertools.product(seeds, streams):
        with _naming_folder(recipe, "data sets", resources.config.data, "--data", "the working folder"):
            content = resources.content(spec.data, stream)
        parameters = dict(spec.parameters)
        if "seed" in parameters and "seed" not in {**entry.fixed, **entry.grid}:
            parameters["seed"] = seed
        yield replace(spec, domains=stream, content=content, seed=seed, parameters=parameters)


@contextmanager
def _naming_folder(recipe: Recipe, what: str, folder: Path | None, option: str, usual: str) -> Iterator[None]:
    """Add to errors the name of the recipe, the folder in which files were looked for, and the option to change it."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        place = usual if folder is None else str(folder)
        text = (
            f"recipe {recipe.name}: {error} ({what} are looked for in {place}; {option} FOLDER names another)"
        )
        kind = FileNotFoundError if isinstance(error, OSError) else ValueError
        raise kind(text) from error


# Checks


def _check_join(recipe: Recipe) -> None:
    """Refuse corruptions that cannot be joined as the recipe asks for."""
    join, names = recipe.stream.join, recipe.data.corruptions
    where = f"recipe {recipe.name}: [stream] join {join!r}"
    if join in WITH_CLEAN and CLEAN in names:
        raise ValueError(f"{where} adds the clean images itself; take {CLEAN!r} out of [data] corruptions")
    if join in WITH_CLEAN and recipe.data.set in CORRUPTED:
        raise ValueError(
            f"{where} needs clean images, which {recipe.data.set} does not have; use a set whose corruptions are "
            "generated, such as cifar10"
        )
    if join == "recurring" and len(names) < 2:
        raise ValueError(f"{where} needs at least two [data] corruptions, got {', '.join(names)}")


def _check_count(recipe: Recipe, entries: Iterable[Entry]) -> None:
    """Refuse a recipe that asks for more runs than anybody could do."""
    lists = (recipe.stream.order, recipe.stream.batch_size, *recipe.stream.options.values(), recipe.sites)
    columns = math.prod(map(len, lists)) * max(len(recipe.data.corruptions), 1)
    settings = sum(
        math.prod(map(len, entry.grid.values())) * len(entry.part.seeds or recipe.seeds) for entry in entries
    )
    if settings * columns > _MOST_RUNS:
        raise ValueError(
            f"recipe {recipe.name} asks for about {settings * columns:.1e} runs; at most {_MOST_RUNS:,} can be "
            "planned. Make its grids, seeds or columns fewer"
        )


def _check_parameters(recipe: Recipe, entries: Iterable[Entry]) -> None:
    """Refuse parameters that no method takes, and values that are not of the type of the default."""
    known: set[str] = set()
    for entry in entries:
        defaults = entry.method.parameters()
        known |= set(defaults)
        pairs = [*entry.fixed.items(), *((name, v) for name, values in entry.grid.items() for v in values)]
        for name, value in pairs:
            if not (entry.method.takes_both(name) and (_is_number(value) or isinstance(value, str))):
                _check_value(f"recipe {recipe.name}, line {entry.label!r}", name, value, defaults[name])
    for part, table in (("params", recipe.params), ("grid", recipe.grid)):
        for name in table:
            if name not in known:
                raise ValueError(
                    f"recipe {recipe.name}: no method of it has the parameter [{part}] {name}; "
                    f"{suggest(name, sorted(known))}"
                )
    for order in recipe.stream.order:
        options = recipe.stream.allowed_options(order)
        for name, values in recipe.stream.options.items():
            for value in values:
                _check_value(f"recipe {recipe.name}, [stream]", name, value, options[name])


def _check_value(where: str, name: str, value: Any, default: Any) -> None:
    words = ""
    if isinstance(default, bool):
        words = "" if isinstance(value, bool) else "true or false"
    elif isinstance(default, int):
        words = "" if _is_number(value) and isinstance(value, int) else "a whole number"
    elif isinstance(default, float):
        words = "" if _is_number(value) else "a number"
    elif isinstance(default, str):
        words = "" if isinstance(value, str) else "a text in quotation marks"
    if words:
        example = str(default).lower() if isinstance(default, bool) else repr(default)
        hint = hint_at_quotes(words, value)
        raise ValueError(f"{where}: {name} must be {words}, such as {example}, got {value!r}{hint}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_members(recipe: Recipe, members: Sequence[Member], resources: Resources) -> None:
    """Try everything once that may be wrong with some of the runs."""
    checked: set[tuple[Any, ...]] = set()
    for member in members:
        spec = member.spec
        # Random lengths may fit with one seed and not with another.
        together = (spec.domains, spec.batch_size, spec.seed) if len(spec.domains) > 1 else ()
        for check, of in (
            (_check_source_data, (spec.method, spec.checkpoint, spec.sites)),
            (_check_adapter, (spec.method, spec.checkpoint, spec.views, spec.sites, repr(spec.parameters))),
            (make_order, (spec.stream, repr(spec.options), spec.limit, together)),
            (_check_outputs, (spec.method, spec.checkpoint, spec.views)),
        ):
            if (check, *of) not in checked:
                checked.add((check, *of))
                try:
                    check(spec, resources)
                except (ValueError, TypeError, RuntimeError) as error:
                    raise ValueError(f"recipe {recipe.name}, line {member.label!r}: {error}") from error


def _list_missing(spec: Spec, resources: Resources) -> list[str]:
    """What has to be computed from training images before the adapter of a run can be built."""
    needs = set(SOURCE_STATISTICS & resources.method(spec.method).needs)
    if "sites" in needs and resources.sites_beside(spec.checkpoint, spec.sites) is not None:
        needs.remove("sites")
    return sorted(needs)


def _check_source_data(spec: Spec, resources: Resources) -> None:
    """Look for the training images, if something has to be computed from them."""
    missing = _list_missing(spec, resources)
    if not missing:
        return
    try:
        resources.check_training(spec.data)
    except ValueError as error:
        advice = "choose a method without this need"
        if missing == ["sites"]:
            advice = f"save sites beside {spec.checkpoint} (ttvd.estimate_sites, ttvd.calibrate)"
        raise ValueError(
            f"{spec.method} needs {' and '.join(missing)}, computed from training images; {error}. Provide them, or "
            f"{advice}"
        ) from error


def _check_adapter(spec: Spec, resources: Resources) -> None:
    check_model(spec, resources)
    if not _list_missing(spec, resources):  # to compute what is missing takes long
        build_adapter(spec, resources)


def _check_outputs(spec: Spec, resources: Resources) -> None:
    """Show two images to the model: it must accept them, and have an output for each class."""
    shown, restriction = resources.base(spec.data, spec.domains[0]), resources.restriction(spec.data)
    x = shown.floats(torch.arange(min(2, len(shown)))).to(resources.device)
    method, missing = resources.method(spec.method), _list_missing(spec, resources)
    if not missing:
        parameters = dict(spec.parameters)
        if type(steps := parameters.get("steps")) is int:
            parameters["steps"] = min(steps, _CHECKED_STEPS)  # many steps take long, and tell no more
        outputs = build_adapter(replace(spec, parameters=parameters), resources)(x).shape[1]
    elif "sites" in method.needs:
        return  # the estimation of sites compares labels and head
    else:
        with torch.no_grad():
            model = prepare_model(resources.source(spec.checkpoint), method, spec.views)
            outputs = model(x).shape[1]
    if restriction is not None:
        classes, exact = restriction.outputs, True
    elif shown.classes is not None:
        # Labels of folders are the places of those that exist: with some missing, they would be other classes.
        classes, exact = len(shown.classes), True
    else:
        classes, exact = int(shown.labels.max()) + 1, False
    if outputs < classes or (exact and outputs != classes):
        raise ValueError(f"{spec.checkpoint} tells {outputs} classes apart, {spec.data} needs {classes}")
