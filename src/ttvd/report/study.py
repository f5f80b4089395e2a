"""The page of a store: every recipe with its tables and figures, failures, and the provenance of each number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ttvd.bench.figures import name_figures
from ttvd.bench.study import study
from ttvd.report.changes import list_changes
from ttvd.report.document import Block, Code, Document, Facts, Fold, Notice, Part, Section, Table, Terms, Text
from ttvd.report.figures import draw_figures
from ttvd.report.provenance import (
    format_corruptions,
    format_data,
    format_span,
    format_time,
    gather,
    list_overrides,
    provenance_section,
)
from ttvd.report.results import (
    ECE,
    ERROR,
    GLOSSARY,
    METRICS,
    RULES,
    Metric,
    Results,
    chosen_without_labels,
    count,
    format_pairs,
)
from ttvd.report.study_figures import (
    pick_lines,
    show_comparisons,
    show_each_stream,
    show_reliability,
    show_stream,
    show_tradeoffs,
)
from ttvd.report.style import figure_style
from ttvd.report.tables import (
    compare_lines,
    comparison_table,
    condition_table,
    continual_table,
    domain_table,
    overview_table,
    summary_table,
)

if TYPE_CHECKING:
    from ttvd.bench.recipe import Recipe
    from ttvd.bench.spec import Run
    from ttvd.bench.store import Failure, Reader
    from ttvd.bench.store import Figure as StoredFigure
    from ttvd.bench.study import Column, Line

LEAD = (
    "A model that was trained on clean images meets a stream of corrupted ones, batch after batch and without labels. "
    "Each method predicts a batch and may adapt the model to it before it sees the next one. The tables show how often "
    "each method is wrong (error) and how far its confidences are from its accuracy (ECE), over the whole stream."
)
READING = (
    "Press a heading to sort by it; press a number, or hover over it, to see the runs that it is made of. "
    "The rule that chose a line's setting always stands beside its name."
)
_MOST_COUNTS = 3  # lengths of streams that a sentence lists
COMPARISONS = (
    "Difference in error to the reference on the same batches, negative: fewer errors. Intervals: bootstrap over "
    "batches, as pairs and within each run. They speak of these streams and these source models, not of others, and "
    "nothing is corrected for the number of comparisons."
)


def make_page(
    store: Reader,
    recipes: Sequence[str] = (),
    *,
    reference: str | None = None,
    methods: Mapping[str, str] | None = None,
) -> Document:
    """Make the page of a store.

    Args:
        store: The store, or packed runs.
        recipes: Names of the recipes to show; all of the store by default.
        reference: Label of the line that the others are compared with; that of each recipe by default.
        methods: What each method does, for the glossary.

    Raises:
        ValueError: The store has no recipes, or not the given ones, or no line has the label ``reference``.
    """
    names = list(recipes) or list(store.recipes())
    if not names:
        raise ValueError(
            "the store holds no recipe, so there is nothing to report; `ttvd bench RECIPE` fills it"
        )
    several = [Results(study(store, name), number) for number, name in enumerate(names, 1)]
    labels = {line.label for results in several for line in results.lines}
    if reference is not None and reference not in labels:
        raise ValueError(f"no line is called {reference!r}; there are: {', '.join(sorted(labels))}")
    keys = {member.spec.key for name in names for member in store.members(name)}
    failures = [failure for failure in store.failures() if failure.key in keys]
    plain = [results for results in several if len(results.conditions()) == 1]
    sections = [_overview_section(plain)] if len(plain) > 1 else []
    for results in several:
        figures = draw_figures(_list_figures(store, results.study.recipe))
        chosen = reference if reference in {line.label for line in results.lines} else None
        title = results.study.recipe.title if len(several) > 1 else "Results"
        sections.append(study_section(results, title, reference=chosen, figures=figures))
    sections += [
        _gaps_section(several, failures),
        _glossary_section(several, methods or {}),
        provenance_section(several),
    ]
    return Document(
        several[0].study.recipe.title if len(several) == 1 else "Benchmark report",
        [LEAD, READING],
        sections,
        _list_highlights(several),
        _list_facts(several, Path(store.path).name),
        [_completeness_notice(several)],
        _list_rules(several),
        "Made by ttvd from the rows of the store; this page needs no other file and no network.",
    )


def _list_figures(store: Reader, recipe: Recipe) -> list[StoredFigure]:
    """Return the stored figures that the recipe still asks for."""
    wanted = name_figures(recipe)
    return [figure for figure in store.figures(recipe.name) if figure.name in wanted]


def _overview_section(several: Sequence[Results]) -> Section:
    lines = [line for results in several for line in results.lines]
    text = "Means over all columns of each study."
    return Section("Overview", "overview", [add_caption(overview_table(several), lines, text)])


def _list_rules(several: Sequence[Results]) -> list[str]:
    """Return the rules that readers can hide, if there are several."""
    used = {line.rule for results in several for line in results.lines}
    return [rule for rule in RULES if rule in used] if len(used) > 1 else []


def _list_highlights(several: Sequence[Results]) -> list[tuple[str, str]]:
    """Return the number of runs, and the best line of each study."""
    runs = sum(len(results.all_runs()) for results in several)
    highlights = [(f"{runs:,}", "runs in these tables")]
    for results in several[:4]:
        complete = [line for line in results.lines if line.rule != "oracle" and not line.pending]
        fair = [line for line in complete if chosen_without_labels(line)] or complete
        known = [(error, line) for line in fair if (error := results.error(line)) is not None]
        if known:
            error, line = min(known, key=lambda pair: pair[0])
            among = "" if len(fair) == len(complete) else " of lines chosen without test labels"
            text = f"lowest mean error{among}: {line.label} ({line.rule})"
            text += f", {results.study.recipe.title}" if len(several) > 1 else ""
            highlights.append((f"{100 * error:.1f} %", text))
    return highlights


def _list_facts(several: Sequence[Results], store: str) -> list[tuple[str, str]]:
    runs = [run for results in several for run in results.all_runs()]
    names = [results.study.recipe.name for results in several]
    # Packed runs came from a store.
    database = str(Path(store).with_suffix(".db")) if store.endswith(".csv") else store
    commands = [
        " ".join(["ttvd bench", f"{name}.toml", "--store", database, *list_overrides(results)])
        for name, results in zip(names, several, strict=True)
    ]
    pairs = [
        ("Store", store),
        ("Recipes", ", ".join(names)),
        ("Data", gather(runs, format_data)),
        ("Models", gather(runs, lambda run: run.spec.checkpoint)),
        ("Versions", gather(runs, lambda run: format_pairs(run.facts.versions))),
        ("Device", gather(runs, lambda run: run.facts.device)),
        ("Measured", format_span([run.facts.started for run in runs])),
        ("Reproduce", f"{'; '.join(commands)}; ttvd report {store} --out DIR (recipes are on this page)"),
    ]
    return [(name, value) for name, value in pairs if value]


def _completeness_notice(several: Sequence[Results]) -> Notice:
    failed = sum(results.study.failed for results in several)
    missing = sum(results.study.missing for results in several)
    if not failed and not missing:
        return Notice("Complete: every run of the recipes is done, none failed.", good=True)
    gaps = f"{count(failed, 'failed run')}, {count(missing, 'run')} not done"
    return Notice(f"Not complete: {gaps}. See “Failures and missing runs” below.")


def _gaps_section(several: Sequence[Results], failures: Sequence[Failure]) -> Section:
    blocks: list[Block] = []
    for results in several:
        study_ = results.study
        waiting = [f"{results.name(line)}: {line.pending}" for line in results.lines if line.pending]
        if waiting:
            counts = f"{study_.recipe.title}: {study_.failed} failed, {study_.missing} not done"
            blocks.append(Text([f"{counts}. By line: {'; '.join(waiting)}."]))
    for failure in failures:
        spec, log = failure.spec, failure.text.strip()
        # Packed runs do not know when a run failed.
        facts = [("Run", failure.key), *([("When", format_time(failure.when))] if failure.when else [])]
        title = f"{spec.method} on {spec.domain_label}, seed {spec.seed}"
        blocks.append(Fold(title, [Facts(facts), Code(log)], (log.splitlines() or [""])[-1]))
    if blocks:
        blocks.append(Text(["The same ttvd bench command does only the runs that are missing."]))
    return Section("Failures and missing runs", "gaps", blocks or [Text(["None."])])


def _glossary_section(several: Sequence[Results], methods: Mapping[str, str]) -> Section:
    rules = list(dict.fromkeys(line.rule for results in several for line in results.lines))
    used = sorted({line.method for results in several for line in results.lines})
    blocks: list[Block] = [
        Fold("Numbers and marks", [Terms(GLOSSARY)]),
        Fold("Rules of selection", [Terms([(rule, RULES[rule]) for rule in rules])]),
    ]
    if known := [(name, methods[name]) for name in used if name in methods]:
        blocks.append(Fold("Methods", [Terms(known)]))
    return Section("Glossary", "glossary", blocks)


def study_section(
    results: Results, title: str, *, reference: str | None = None, figures: Sequence[Block] = ()
) -> Section:
    """Make the section of one recipe: its tables and figures.

    Args:
        results: The numbers of the recipe.
        title: Title of the section.
        reference: Label of the line that the others are compared with; that of the recipe by default.
        figures: Figures of the store, already drawn.
    """
    recipe = results.study.recipe
    blocks: list[Block] = [Text([recipe.note] if recipe.note else []), Text([describe_study(results)])]
    blocks += list_gaps(results)
    if results.all_runs():
        text = "Means over all columns of the study."
        summary = Part("All lines", [add_caption(summary_table(results), results.lines, text)])
        tables = _list_tables(results)
        blocks += [summary, *tables] if len(results.conditions()) == 1 else [*tables, summary]
        with figure_style():
            blocks += _list_study_figures(results, reference)
    blocks += figures
    options = list_overrides(results)
    used = f"Recipe {recipe.name}.toml" + (f", run with {' '.join(options)}" if options else "") + ":"
    blocks.append(Fold("The recipe", [Text([used]), Code(recipe.text.strip())]))
    return Section(title, f"study-{results.number}", blocks)


def describe_study(results: Results) -> str:
    """Describe data, stream and size of a study in a sentence or two."""
    study, runs = results.study, results.all_runs()
    if not runs:
        return "None of its runs is done yet."
    specs = [run.spec for run in runs]
    domains = len({domain for spec in specs for domain in spec.domains})
    joined = sorted({spec.join for spec in specs if len(spec.domains) > 1})
    sizes = sorted({spec.batch_size for spec in specs})
    seeds = sorted({spec.seed for spec in specs})
    streams = sorted({spec.stream for spec in specs})
    origin = ", ".join(sorted({format_corruptions(spec) for spec in specs}))
    visited = ", ".join(f" {_VISITS.get(join, 'in one stream')} ({join})" for join in joined)
    parts = [count(domains, "domain") + visited, count(len(study.lines), "line"), count(len(seeds), "seed")]
    return (
        f"Data set {', '.join(sorted({spec.data for spec in specs}))}, {_count_images(runs)} images in each stream, "
        f"corruptions: {origin}. {', '.join(parts)}; order {', '.join(streams)}, batches of "
        f"{', '.join(map(str, sizes))}."
    )


_VISITS = {
    "onset": "with clean images before and after each shift",
    "rare": "with rare batches among clean images",
    "recurring": "over and over in one stream",
}


def _count_images(runs: Sequence[Run]) -> str:
    """Return the number of images of a stream; both numbers if oracles saw another one."""
    counts: dict[bool, set[int]] = {False: set(), True: set()}
    for run in runs:
        counts[run.spec.selection == "oracle"].add(int(run.record.sizes().sum()))
    usual, oracle = (_list_counts(sorted(counts[kind])) for kind in (False, True))
    if not usual or not oracle or usual == oracle:
        return usual or oracle
    return f"{usual} (oracle lines: {oracle})"


def _list_counts(counts: Sequence[int]) -> str:
    if len(counts) > _MOST_COUNTS:
        return f"{counts[0]:,} to {counts[-1]:,}"
    return " or ".join(f"{number:,}" for number in counts)


def list_gaps(results: Results) -> list[Notice]:
    """Return a warning if runs of a study failed or are not done."""
    study = results.study
    if not study.missing and not study.failed:
        return []
    return [
        Notice(
            f"Not complete: {count(study.failed, 'run')} failed, {study.missing} not done. Numbers that they affect "
            "carry a dagger (†) or are empty; a rule with missing runs compares the settings with a complete seed, by "
            "the seeds that all of these have."
        )
    ]


def _list_tables(results: Results) -> list[Block]:
    conditions = results.conditions()
    if len(conditions) == 1:
        tables = _by_domain(results, results.columns, results.study.recipe.name)
        return [*_by_change(results), *tables, *_by_visit(results)]
    text = "Means over the domains of each condition."
    parts = _by_change(results)
    parts += [
        Part(
            f"{name_metric(metric)} by condition",
            [add_caption(condition_table(results, metric), results.lines, text)],
        )
        for metric in (ERROR, ECE)
    ]
    for number, (title, columns) in enumerate(conditions.items(), 1):
        if len(columns) > 1:
            name = f"{results.study.recipe.name}-{number}"
            parts.append(Fold(f"By domain: {title}", _by_domain(results, columns, name)))
    return parts + _by_visit(results)


def _by_domain(results: Results, columns: Sequence[Column], name: str) -> list[Block]:
    if len(columns) < 2:
        return []

    def build(metric: Metric) -> Table:
        table = domain_table(results, columns, metric, f"{name}-{metric.name}")
        return add_caption(table, results.lines, describe_metric(metric))

    first, *others = METRICS
    folds = [Fold(f"{metric.title} by domain", [build(metric)]) for metric in others]
    return [Part("Error by domain", [build(first)]), *folds]


def _by_visit(results: Results) -> list[Block]:
    """Return the tables of streams that visit several domains without a reset."""
    found = [(column, continual_table(results, column)) for column in results.columns]
    text = "Error in each domain in per cent, in the order in which the one stream visits them."
    return [
        Part(f"Domain after domain: {column.label}", [add_caption(table, results.lines, text)])
        for column, table in found
        if table is not None
    ]


def _by_change(results: Results) -> list[Block]:
    """Return the tables of streams whose shift comes and goes."""
    return [
        Part(change.title, [add_caption(change.table, results.lines, change.text)])
        for change in list_changes(results)
    ]


def describe_metric(metric: Metric) -> str:
    """Say in a sentence what the numbers of a table are."""
    unit = "per cent" if metric.scale == 100 else metric.note
    return f"{name_metric(metric)}{f' in {unit}' if unit else ''}."


def name_metric(metric: Metric) -> str:
    """Return the title of a metric without its unit, for the beginning of a sentence."""
    name = metric.title.partition(" (")[0]
    return name[0].upper() + name[1:]


def add_caption(table: Table, lines: Sequence[Line], text: str) -> Table:
    """Return a table whose caption is a text and the explanation of the marks that the lines have."""
    oracle = (
        " (oracle lines, which see the labels, left out)"
        if any(line.rule == "oracle" for line in lines)
        else ""
    )
    marks = f" Lower is better; bold: the lowest of a column{oracle}"
    fair = [chosen_without_labels(line) for line in lines]
    if any(fair) and any(not f and line.rule != "oracle" for f, line in zip(fair, lines, strict=True)):
        marks += "; underlined: the lowest of those whose setting was chosen without test labels, where that is another"
    return replace(table, caption=f"{text}{marks}.{_explain_spread(table, lines)}")


def _explain_spread(table: Table, lines: Sequence[Line]) -> str:
    counts = sorted(
        {len({run.spec.seed for runs in line.runs.values() for run in runs}) for line in lines} - {0}
    )
    if not any(cell.note.startswith("±") for row in table.rows for cell in row):
        return " One seed, so there is no spread." if counts == [1] else ""
    several = [number for number in counts if number > 1]
    single = "; lines without it have one seed" if 1 in counts else ""
    return f" ± is the standard deviation over {' or '.join(map(str, several))} seeds{single}."


def _list_study_figures(results: Results, reference: str | None) -> list[Block]:
    lines = pick_lines(results, reference)
    comparisons = compare_lines(results, reference)
    blocks: list[Block | None] = [show_stream(results, lines)]
    each = show_each_stream(results, lines) if len(results.columns) > 1 else None
    blocks.append(Fold("Curves of each column", [each]) if each is not None else None)
    blocks += [show_tradeoffs(results, lines), show_reliability(results, lines) if lines else None]
    if comparisons:
        table = replace(comparison_table(results, comparisons), caption=COMPARISONS)
        blocks.append(show_comparisons(results, comparisons, lines))
        blocks.append(Fold("All comparisons as a table", [table]))
    return [block for block in blocks if block is not None]
