"""What a store says about a recipe: lines, columns, and which setting of a grid each rule of selection chooses."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from ttvd.bench.recipe import Recipe, Rule, parse_recipe
from ttvd.bench.recipe.planning import Entry, list_entries
from ttvd.bench.spec import Member, Run, Spec
from ttvd.bench.store import Reader

Cell = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        domain: What happened to the images, in words; empty for all domains together.
        condition: What else distinguishes it, names and values; often empty.
    """

    domain: str
    condition: Cell = ()

    @property
    def label(self) -> str:
        """Its heading."""
        words = [f"{name.replace('_', ' ')} {value:g}" if isinstance(value, float | int) else f"{value}"
                 for name, value in self.condition]  # fmt: skip
        return ", ".join([self.domain, *words] if self.domain else words) or "all"


@dataclass(frozen=True, eq=False)
class Line:
    """A line of a table.

    Attributes:
        label: How the recipe calls it.
        rule: How its setting was chosen.
        method: The registered method.
        checkpoint: The source model.
        views: Views that were aggregated around the method.
        parameters: The chosen values of what its grid varies; empty while the rule cannot choose.
        tried: Settings that were compared.
        runs: For each column its finished runs, by seed; none while the rule cannot choose.
        pending: Runs that are still missing or have failed, of all settings.
    """

    label: str
    rule: Rule
    method: str
    checkpoint: str
    views: int
    parameters: Mapping[str, Any]
    tried: int
    runs: Mapping[Column, tuple[Run, ...]]
    pending: int = 0

    def seeds(self, columns: Iterable[Column]) -> list[int]:
        """Seeds for which all these columns have a run."""
        found = [{run.spec.seed for run in self.runs.get(column, ())} for column in columns]
        return sorted(set.intersection(*found)) if found else []

    def values(self, metric: str, columns: Sequence[Column]) -> list[float]:
        """A metric, averaged over columns, for each seed that has them all."""
        return [
            fmean(
                run.totals[metric] for column in columns for run in self.runs[column] if run.spec.seed == seed
            )
            for seed in self.seeds(columns)
        ]

    def mean(self, metric: str, columns: Sequence[Column]) -> float | None:
        """The mean over seeds; None where no seed has all columns."""
        values = self.values(metric, columns)
        return fmean(values) if values else None

    def spread(self, metric: str, columns: Sequence[Column]) -> float | None:
        """The standard deviation over seeds; None for fewer than two."""
        values = self.values(metric, columns)
        return stdev(values) if len(values) > 1 else None


@dataclass(frozen=True, eq=False)
class Study:
    """All lines of a recipe, as far as its runs are done.

    Attributes:
        recipe: What was asked.
        columns: In the order of the recipe.
        lines: Likewise, those that were asked for; a method with several rules has a line for each.
        missing: Runs that are neither done nor failed.
        failed: Runs that failed.
    """

    recipe: Recipe
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    missing: int
    failed: int

    def conditions(self) -> list[Cell]:
        """The distinct conditions of the columns, in order."""
        return list(dict.fromkeys(column.condition for column in self.columns))

    def reference(self) -> str:
        """Label of the line that the others are compared with."""
        wanted, labels = self.recipe.reference, [line.label for line in self.lines]
        return wanted if wanted is not None and (wanted in labels or not labels) else labels[-1]


def study(store: Reader, name: str) -> Study:
    """What the store says about one of its recipes.

    Args:
        store: Which holds the recipe and its runs, or a file of packed ones.
        name: One of ``store.recipes()``.
    """
    recipes = store.recipes()
    if name not in recipes:
        raise ValueError(f"the store has no recipe {name!r}; it has: {', '.join(recipes) or 'none'}")
    recipe, members = parse_recipe(recipes[name], name), store.members(name)
    keys = {member.spec.key for member in members}
    runs = store.load(keys & store.done())
    failed = {failure.key for failure in store.failures()} & keys
    columns = dict.fromkeys(_place(member) for member in members if member.role == "test")
    asked = {member.label for member in members}
    lines = [
        _choose(entry, rule, [member for member in members if member.label == entry.label], runs)
        for entry in list_entries(recipe)
        if entry.label in asked  # some of them alone, if the command line said so
        for rule in entry.rules
    ]
    return Study(recipe, tuple(columns), tuple(lines), len(keys - set(runs) - failed), len(failed))


def _place(member: Member) -> Column:
    return Column(member.spec.domain_label, tuple(sorted(member.condition.items())))


def _choose(entry: Entry, rule: Rule, members: Sequence[Member], runs: Mapping[str, Run]) -> Line:
    """The line of a method under a rule: the best setting of its grid, and the runs of that setting."""
    wanted = "oracle" if rule == "oracle" else "last"
    cells: dict[Cell, list[Member]] = {}
    for member in members:
        if member.spec.selection == wanted:
            cells.setdefault(tuple(sorted(member.varies.items())), []).append(member)
    best = _find_best(cells, rule, runs)
    found: dict[Column, list[Run]] = {}
    for member in [] if best is None else cells[best]:
        if member.role == "test" and member.spec.key in runs:
            found.setdefault(_place(member), []).append(runs[member.spec.key])
    return Line(
        entry.label,
        rule,
        entry.method.name,
        entry.checkpoint,
        entry.part.views,
        dict(best or ()),
        len(cells),
        {column: tuple(sorted(group, key=lambda run: run.spec.seed)) for column, group in found.items()},
        sum(member.spec.key not in runs for group in cells.values() for member in group),
    )


def _find_best(cells: Mapping[Cell, Sequence[Member]], rule: Rule, runs: Mapping[str, Run]) -> Cell | None:
    """The setting that a rule chooses; None while it cannot choose, so that no setting passes for the chosen one."""
    judged = {cell: _list_judged(group, rule) for cell, group in cells.items()}
    # A setting without a whole seed cannot be compared: the others are, by the seeds that all of them have, and the
    # line says that something is pending.
    whole = {cell: seeds for cell, asked in judged.items() if (seeds := _list_seeds(asked, runs))}
    if shared := set.intersection(*whole.values()) if whole else set():
        scores = {
            cell: fmean(runs[spec.key].totals["error"] for spec in judged[cell] if spec.seed in shared)
            for cell in whole
        }
        return min(scores, key=lambda cell: scores[cell])
    only = next(iter(cells)) if len(cells) == 1 else None  # where nothing is searched, parts can be shown
    return only if only is not None and judged[only] else None


def _list_seeds(asked: Sequence[Spec], runs: Mapping[str, Run]) -> set[int]:
    """Seeds of which all runs are done."""
    return {spec.seed for spec in asked} - {spec.seed for spec in asked if spec.key not in runs}


def _list_judged(members: Sequence[Member], rule: Rule) -> list[Spec]:
    """The runs by whose mean error a rule judges a setting."""
    role = "validation" if rule == "validation" else "test"
    return [member.spec for member in members if member.role == role]
