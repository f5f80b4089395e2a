"""The page of a store: every recipe with its tables and figures, what failed, and where each number comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ttvd.bench.figures import name_figures
from ttvd.bench.store.reader import check_name
from ttvd.bench.study import study
from ttvd.files import open_atomic
from ttvd.report.document import (
    Block,
    Code,
    Document,
    Facts,
    Fold,
    Notice,
    Section,
    Text,
    find_tables,
    render_document,
)
from ttvd.report.export import WRITERS
from ttvd.report.gallery import draw_gallery
from ttvd.report.provenance import (
    gather,
    list_overrides,
    render_origin,
    render_provenance,
    show_span,
    show_time,
)
from ttvd.report.results import Results, count, is_honest, show_pairs
from ttvd.report.study_section import caption_table, render_study
from ttvd.report.tables import overview_table
from ttvd.report.words import METRICS, RULES

if TYPE_CHECKING:
    from ttvd.bench.recipe import Recipe
    from ttvd.bench.store import Failure, Figure, Reader

LEAD = (
    "A model that was trained on clean images meets a stream of corrupted ones, batch after batch and without labels. "
    "Each method predicts a batch and may adapt the model to it before it sees the next one. The tables say how often "
    "each method is wrong (error) and how far its confidences are from the truth (ECE), over the whole stream."
)
READING = (
    "Press a heading to sort by it; press a number, or hover over it, to see the runs that it is made of. "
    "How a line's setting was chosen always stands beside its name."
)


def make_page(
    store: Reader,
    recipes: Sequence[str] = (),
    *,
    reference: str | None = None,
    methods: Mapping[str, str] | None = None,
) -> Document:
    """All that the page of a store holds.

    Args:
        store: Whose runs.
        recipes: Names of those to show; all of the store unless given.
        reference: Label of the line that the others are compared with; the recipes' own unless given.
        methods: What each method does, for the glossary.

    Raises:
        ValueError: The store has no recipes, or not those that were asked for.
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
    sections = [_compare(plain)] if len(plain) > 1 else []
    for results in several:
        figures = draw_gallery(_list_figures(store, results.study.recipe))
        chosen = reference if reference in {line.label for line in results.lines} else None
        title = results.study.recipe.title if len(several) > 1 else "Results"
        sections.append(render_study(results, title, reference=chosen, figures=figures))
    sections += [
        _render_gaps(several, failures),
        _explain(several, methods or {}),
        render_provenance(several),
    ]
    title = several[0].study.recipe.title if len(several) == 1 else "Benchmark report"
    return Document(
        title,
        [LEAD, READING],
        _count(several),
        _list_facts(several, Path(store.path).name),
        _warn(several),
        sections,
        _list_rules(several),
        "Made by ttvd from the store's rows; this page needs no other file and no network.",
    )


def _list_figures(store: Reader, recipe: Recipe) -> list[Figure]:
    """The stored figures that the recipe still asks for."""
    wanted = name_figures(recipe)
    return [figure for figure in store.figures(recipe.name) if figure.name in wanted]


def write_report(document: Document, folder: Path, page: str = "index.html") -> list[Path]:
    """Write the page, and its tables as files of their own.

    Returns:
        The paths, that of the page first.

    Raises:
        ValueError: A table is called like a recipe whose name leads out of the folder; nothing is written.
    """
    files = {folder / page: render_document(document)}
    for table in find_tables(document):
        check_name(table.name)
        for suffix, write in WRITERS.items():
            files[folder / "tables" / f"{table.name}.{suffix}"] = write(table)
    for path, text in files.items():
        with open_atomic(path, sync=False) as file:
            file.write(text.encode())
    return list(files)


def _compare(several: Sequence[Results]) -> Section:
    lines = [line for results in several for line in results.lines]
    text = "Means over all columns of each study."
    return Section("Overview", "overview", [caption_table(overview_table(several), lines, text)])


def _list_rules(several: Sequence[Results]) -> list[str]:
    """Rules that readers can hide, where there are several."""
    used = {line.rule for results in several for line in results.lines}
    return [rule for rule in RULES if rule in used] if len(used) > 1 else []


def _count(several: Sequence[Results]) -> list[tuple[str, str]]:
    """The most important numbers: runs, and who is best where."""
    runs = sum(len(results.all_runs()) for results in several)
    figures = [(f"{runs:,}", "runs in these tables")]
    for results in several[:4]:
        whole = [line for line in results.lines if line.rule != "oracle" and not line.pending]
        fair = [line for line in whole if is_honest(line)] or whole
        known = [(error, line) for line in fair if (error := results.error(line)) is not None]
        if known:
            error, line = min(known, key=lambda pair: pair[0])
            among = "" if len(fair) == len(whole) else " of lines chosen without test labels"
            text = f"lowest mean error{among}: {line.label} ({line.rule})"
            figures.append(
                (
                    f"{100 * error:.1f} %",
                    f"{text}, {results.study.recipe.title}" if len(several) > 1 else text,
                )
            )
    return figures


def _list_facts(several: Sequence[Results], store: str) -> list[tuple[str, str]]:
    runs = [run for results in several for run in results.all_runs()]
    names = [results.study.recipe.name for results in several]
    kept = (
        str(Path(store).with_suffix(".db")) if store.endswith(".csv") else store
    )  # packed runs came from a store
    remake = "; ".join(
        " ".join(
            ["ttvd bench", f"{results.study.recipe.name}.toml", "--store", kept, *list_overrides(results)]
        )
        for results in several
    )
    pairs = [
        ("Store", store),
        ("Recipes", ", ".join(names)),
        ("Data", gather(runs, lambda run: f"{run.spec.data}, corruptions: {render_origin(run.spec)}")),
        ("Models", gather(runs, lambda run: run.spec.checkpoint)),
        ("Versions", gather(runs, lambda run: show_pairs(run.facts.versions))),
        ("Device", gather(runs, lambda run: run.facts.device)),
        ("Runs made", show_span([run.facts.started for run in runs])),
        ("Make it again", f"{remake}; ttvd report {store} --out DIR (recipes are on this page)"),
    ]
    return [(name, value) for name, value in pairs if value]


def _warn(several: Sequence[Results]) -> list[Notice]:
    failed = sum(results.study.failed for results in several)
    missing = sum(results.study.missing for results in several)
    if not failed and not missing:
        return [Notice("Complete: every run that the recipes ask for is done, none failed.", good=True)]
    gaps = f"{count(failed, 'failed run')}, {count(missing, 'run')} not done"
    return [Notice(f"Not complete: {gaps}. See “Failures and missing runs” below.")]


def _render_gaps(several: Sequence[Results], failures: Sequence[Failure]) -> Section:
    blocks: list[Block] = []
    for results in several:
        study_ = results.study
        waiting = [f"{results.name(line)}: {line.pending}" for line in results.lines if line.pending]
        if waiting:
            counts = f"{study_.recipe.title}: {study_.failed} failed, {study_.missing} not done"
            blocks.append(Text([f"{counts}. By line: {'; '.join(waiting)}."]))
    blocks += [
        Fold(
            f"{failure.spec.method} on {failure.spec.domain_label}, seed {failure.spec.seed}",
            [Facts([("Run", failure.key), *_render_time(failure)]), Code(failure.text.strip())],
            (failure.text.strip().splitlines() or [""])[-1],
        )
        for failure in failures
    ]
    if not blocks:
        return Section("Failures and missing runs", "gaps", [Text(["None."])])
    again = Text(["Starting the same ttvd bench command again does only what is missing."])
    return Section("Failures and missing runs", "gaps", [*blocks, again])


def _render_time(failure: Failure) -> list[tuple[str, str]]:
    """When it failed, where that is known: packed runs do not tell."""
    return [("When", show_time(failure.when))] if failure.when else []


def _explain(several: Sequence[Results], methods: Mapping[str, str]) -> Section:
    rules = list(dict.fromkeys(line.rule for results in several for line in results.lines))
    used = sorted({line.method for results in several for line in results.lines})
    blocks: list[Block] = [
        Fold("Numbers and marks", [Facts(METRICS)]),
        Fold("Rules of selection", [Facts([(rule, RULES[rule]) for rule in rules])]),
    ]
    if known := [(name, methods[name]) for name in used if name in methods]:
        blocks.append(Fold("Methods", [Facts(known)]))
    return Section("What the words mean", "words", blocks)
