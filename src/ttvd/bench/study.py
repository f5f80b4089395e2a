"""The table of a recipe as far as its runs are done, with the setting that each rule of selection chooses."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from ttvd.bench.recipe import MethodPart, Recipe, Rule, choose_rules, list_lines, parse_recipe
from ttvd.bench.spec import Member, Run, Spec
from ttvd.bench.store import Reader

Cell = tuple[tuple[str, Any], ...]
"""Names and values in a fixed order: a setting of a grid, or the condition of a column."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        domain: Label of the domain; empty for all domains together.
        condition: What else distinguishes the column; often empty.
    """

    domain: str
    condition: Cell = ()

    @property
    def label(self) -> str:
        """The heading of the column."""
        words = [f"{name.replace('_', ' ')} {value:g}" if isinstance(value, float | int) else f"{value}"
                 for name, value in self.condition]  # fmt: skip
        return ", ".join([self.domain, *words] if self.domain else words) or "all"


@dataclass(frozen=True, eq=False)
class Line:
    """A line of a table.

    Attributes:
        label: Label in the recipe.
        rule: Rule by which the setting was chosen.
        method: Name of the registered method.
        checkpoint: Source model.
        views: Number of views that were aggregated around the method.
        parameters: Chosen values of the parameters that the grid varies; empty while the rule cannot choose.
        tried: Number of settings that were compared.
        runs: Finished runs of each column, by seed; empty while the rule cannot choose.
        pending: Number of runs, of all settings, that are missing or have failed.
        fresh: Fresh starts on the shifted part of each onset, as ``runs``.
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
    fresh: Mapping[Column, tuple[Run, ...]] = field(default_factory=dict)

    def seeds(self, columns: Iterable[Column]) -> list[int]:
        """Return the seeds for which all these columns have a run."""
        found = [{run.spec.seed for run in self.runs.get(column, ())} for column in columns]
        return sorted(set.intersection(*found)) if found else []

    def values(self, metric: str, columns: Sequence[Column]) -> list[float]:
        """Return a metric, averaged over columns, for each seed that has them all."""
        return [
            fmean(
                run.totals[metric] for column in columns for run in self.runs[column] if run.spec.seed == seed
            )
            for seed in self.seeds(columns)
        ]

    def mean(self, metric: str, columns: Sequence[Column]) -> float | None:
        """Return the mean over seeds; None where no seed has all columns."""
        values = self.values(metric, columns)
        return fmean(values) if values else None

    def spread(self, metric: str, columns: Sequence[Column]) -> float | None:
        """Return the standard deviation over seeds; None for fewer than two."""
        values = self.values(metric, columns)
        return stdev(values) if len(values) > 1 else None


@dataclass(frozen=True, eq=False)
class Study:
    """All lines of a recipe, as far as its runs are done.

    Attributes:
        recipe: The recipe.
        columns: Columns in the order of the recipe.
        lines: Lines in the order of the recipe. A method with several rules has a line for each rule.
        missing: Number of runs that are neither done nor failed.
        failed: Number of runs that failed.
    """

    recipe: Recipe
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    missing: int
    failed: int

    def conditions(self) -> list[Cell]:
        """Return the distinct conditions of the columns, in order."""
        return list(dict.fromkeys(column.condition for column in self.columns))

    def reference(self) -> str:
        """Return the label of the line that the others are compared with."""
        wanted, labels = self.recipe.reference, [line.label for line in self.lines]
        return wanted if wanted is not None and (wanted in labels or not labels) else labels[-1]


def study(store: Reader, name: str) -> Study:
    """Return the table of a recipe from the runs of a store. Code that the recipe names is not imported.

    Args:
        store: A store, or a file of packed runs.
        name: Name of a recipe, one of ``store.recipes()``.
    """
    recipes = store.recipes()
    if name not in recipes:
        raise ValueError(f"the store has no recipe {name!r}; it has: {', '.join(recipes) or 'none'}")
    recipe, members = parse_recipe(recipes[name], name), store.members(name)
    keys = {member.spec.key for member in members}
    runs = store.load(keys & store.done())
    failed = {failure.key for failure in store.failures()} & keys
    columns = dict.fromkeys(_place(member) for member in members if member.role == "test")
    asked: dict[str, list[Member]] = {}
    for member in members:
        asked.setdefault(member.label, []).append(member)
    lines = [
        _choose(rule, asked[label], runs)
        for label, (part, _) in list_lines(recipe).items()
        if label in asked  # the command line can leave lines out
        for rule in _list_rules(recipe, part, asked[label])
    ]
    return Study(recipe, tuple(columns), tuple(lines), len(keys - set(runs) - failed), len(failed))


def _place(member: Member) -> Column:
    return Column(member.spec.domain_label, tuple(sorted(member.condition.items())))


def _list_rules(recipe: Recipe, part: MethodPart, members: Sequence[Member]) -> tuple[Rule, ...]:
    """The rules of a line. What there is to know of its method, the specs of its runs tell."""
    allowed = members[0].spec.parameters
    searched = any(name in allowed and name not in part.params for name in recipe.grid) or bool(part.grid)
    steps = any(member.spec.selection == "oracle" for member in members)
    return choose_rules(recipe, part, searched=searched, steps=steps)


def _choose(rule: Rule, members: Sequence[Member], runs: Mapping[str, Run]) -> Line:
    """The line of a method under a rule, with the runs of the setting that the rule chooses."""
    label, spec = members[0].label, members[0].spec
    wanted = "oracle" if rule == "oracle" else "last"
    cells: dict[Cell, list[Member]] = {}
    for member in members:
        if member.spec.selection == wanted:
            cells.setdefault(tuple(sorted(member.varies.items())), []).append(member)
    best = _find_best(cells, rule, runs)
    chosen = [] if best is None else cells[best]
    return Line(
        label,
        rule,
        spec.method,
        spec.checkpoint,
        spec.views,
        dict(best or ()),
        len(cells),
        _group_runs([member for member in chosen if member.role == "test"], runs),
        sum(member.spec.key not in runs for group in cells.values() for member in group),
        _group_runs([member for member in chosen if member.role == "fresh"], runs),
    )


def _group_runs(members: Sequence[Member], runs: Mapping[str, Run]) -> dict[Column, tuple[Run, ...]]:
    """The finished runs of each column, by seed."""
    found: dict[Column, list[Run]] = {}
    for member in members:
        if member.spec.key in runs:
            found.setdefault(_place(member), []).append(runs[member.spec.key])
    return {column: tuple(sorted(group, key=lambda run: run.spec.seed)) for column, group in found.items()}


def _find_best(cells: Mapping[Cell, Sequence[Member]], rule: Rule, runs: Mapping[str, Run]) -> Cell | None:
    """The setting that a rule chooses; None while it cannot choose."""
    judged = {cell: _list_judged(group, rule) for cell, group in cells.items()}
    # A setting without a complete seed is left out. The others are compared by the seeds that all of them have, and
    # the line says that runs are pending.
    whole = {cell: seeds for cell, asked in judged.items() if (seeds := _list_seeds(asked, runs))}
    if shared := set.intersection(*whole.values()) if whole else set():
        scores = {
            cell: fmean(runs[spec.key].totals["error"] for spec in judged[cell] if spec.seed in shared)
            for cell in whole
        }
        return min(scores, key=lambda cell: scores[cell])
    only = (
        next(iter(cells)) if len(cells) == 1 else None
    )  # where nothing is searched, a part of the runs can be shown
    return only if only is not None and judged[only] else None


def _list_seeds(asked: Sequence[Spec], runs: Mapping[str, Run]) -> set[int]:
    """Seeds whose runs are all done."""
    return {spec.seed for spec in asked} - {spec.seed for spec in asked if spec.key not in runs}


def _list_judged(members: Sequence[Member], rule: Rule) -> list[Spec]:
    """The runs by whose mean error a rule judges a setting."""
    role = "validation" if rule == "validation" else "test"
    return [member.spec for member in members if member.role == role]
