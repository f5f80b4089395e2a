"""A folder of committed results: documents and figures, made from the packed runs in it.

``rows/*.csv`` are the packed runs, ``paper.toml`` has the numbers that the paper printed. ``write_results`` makes the
rest: a document for each study, its figures, an index, and the table of the project's README.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from ttvd.bench.packed import PackedRuns
from ttvd.bench.recipe import list_lines, parse_recipe
from ttvd.bench.study import study
from ttvd.files import open_atomic
from ttvd.report.changes import list_changes
from ttvd.report.document import (
    MISSING,
    Cell,
    Code,
    Document,
    Figure,
    Heading,
    Link,
    Provenance,
    Section,
    Table,
    Terms,
    text_cell,
)
from ttvd.report.export import render_markdown, to_markdown
from ttvd.report.provenance import format_command, format_span, gather, list_facts
from ttvd.report.results import BATCH_ECE, ECE, ERROR, RULES, Metric, Results, split_severity
from ttvd.report.study import COMPARISONS, add_caption, describe_metric, describe_study, list_gaps
from ttvd.report.study_figures import (
    pick_lines,
    show_comparisons_file,
    show_conditions_file,
    show_stream_file,
)
from ttvd.report.tables import (
    NOT_ASKED,
    cells_by_line,
    compare_lines,
    comparison_table,
    condition_table,
    continual_table,
    domain_table,
    rules_table,
    summary_table,
)

if TYPE_CHECKING:
    from ttvd.bench.spec import Run
    from ttvd.bench.study import Column, Line
    from ttvd.report.tables import PairedComparison

MADE = "<!-- Made by `make results`; changes to this file are lost. -->"
_BEGINNING = 200  # bytes of a file in which this mark must stand

INTRODUCTION = f"""{MADE}
# Results

`make results` makes every document and figure here from the rows in `rows/`, offline, and gives the same bytes
each time. `rows/NAME.csv` has a line for each run: its spec, devices and versions, the sums behind all numbers, and a
digest; `rows/NAME.toml` is the recipe. [paper.toml](paper.toml) has the paper's numbers.

```sh
ttvd bench recipes/NAME.toml --store out/NAME.db  # measure; see docs/benchmark.md
ttvd runs out/NAME.db --pack results/rows         # add the runs; runs that are there already stay
make results
ttvd report results/rows/NAME.csv --out out/NAME  # a page to explore
ttvd runs out/mine.db --unpack results/rows/NAME.csv  # continue from these runs, e.g. with a method of yours
```
"""
MAIN = ("table1-cifar10", "table1-cifar100")
"""Recipes of the main table, as far as there are runs."""

README_LINES = {"source": "source", "bn": "bn", "tent": "Tent", "SLA + tent": "SLA + Tent", "ttvd": "ttvd"}
"""Lines of the table of the project's README, and how it calls them."""

BEGIN, END = "<!-- main table: begin -->", "<!-- main table: end -->"
SHOWN = {ERROR: "Error", ECE: "ECE over the stream", BATCH_ECE: "ECE of single batches"}
"""Metrics of the documents, and how their sections call them."""


def write_results(folder: Path, readme: Path | None = None) -> list[Path]:
    """Make all documents and figures of a folder, and the table of a README.

    Args:
        folder: Folder with ``rows/*.csv`` and ``paper.toml``.
        readme: Document with the markers of the table.

    Returns:
        The paths that were written.

    Raises:
        ValueError: Rows are damaged or do not fit their recipe; nothing has been written then.
    """
    printed = read_paper(folder / "paper.toml")
    several = [read_study(path) for path in list_rows(folder)]
    files: dict[Path, bytes] = {}
    for results in several:
        name = results.study.recipe.name
        text, pictures = render_markdown(make_document(results, printed.get(name)))
        files[folder / f"{name}.md"] = f"{MADE}\n\n{text}".encode()
        files |= {folder / "figures" / title: _mark_svg(svg) for title, svg in pictures.items()}
    files[folder / "README.md"] = render_index(several, printed).encode()
    if readme is not None:
        text = readme.read_text(encoding="utf-8")
        filled = fill_markers(text, readme_table(pick_main(several)))
        files |= {readme: filled.encode()} if filled != text else {}
    for path in _list_made(folder):
        if path not in files:
            path.unlink()
    for path, content in files.items():
        with open_atomic(path, sync=False) as file:
            file.write(content)
    return list(files)


def list_rows(folder: Path) -> list[Path]:
    """Return the files of packed runs in a folder of results, by name."""
    return sorted((folder / "rows").glob("*.csv"))


def read_study(path: Path) -> Results:
    """Read the study of a file of packed runs.

    Raises:
        ValueError: The file is damaged, or its recipe asks for lines that it does not have.
    """
    pack = PackedRuns(path)
    wanted = set(list_lines(parse_recipe(pack.recipes()[pack.name], pack.name)))
    there = {member.label for member in pack.members(pack.name)}
    if wanted != there:
        odd = ", ".join(sorted(wanted ^ there))
        raise ValueError(f"{path} and its recipe {pack.name}.toml do not fit: lines that only one has: {odd}")
    return Results(study(pack, pack.name))


def _mark_svg(svg: bytes) -> bytes:
    """Return an SVG with the mark of made files after its first line."""
    first, _, rest = svg.partition(b"\n")
    return b"\n".join([first, MADE.encode(), rest])


def _list_made(folder: Path) -> list[Path]:
    """Return the documents and figures that ``make results`` made before: those that say so at their beginning."""
    paths = [*folder.glob("*.md"), *(folder / "figures").glob("*.svg")]
    return [path for path in paths if path.is_file() and MADE.encode() in path.read_bytes()[:_BEGINNING]]


def make_document(results: Results, printed: Printed | None = None) -> Document:
    """Make the document of a study; above each table and picture stands how its numbers were made.

    Args:
        results: The study.
        printed: The paper's numbers for it.
    """
    recipe, runs = results.study.recipe, results.all_runs()
    lead = [recipe.note.strip(), describe_study(results)]
    if not runs:
        return Document(recipe.title, lead, [], notices=list_gaps(results))
    links = [(title, f"rows/{recipe.name}.{end}") for title, end in (("Rows", "csv"), ("Recipe", "toml"))]
    facts: list[tuple[str, str | Code | Link]] = [
        ("Command", Code(format_command(results))),
        *list_facts(runs),
        *((title, Link(path, path)) for title, path in links),
    ]
    rules = dict.fromkeys(line.rule for line in results.lines)
    comparisons = compare_lines(results)
    sections = [
        *_table_sections(results, printed),
        *_comparison_sections(results, comparisons),
        *_figure_sections(results, comparisons),
        Section("How settings are chosen", "rules", [Terms([(rule, RULES[rule]) for rule in rules])]),
    ]
    return Document(recipe.title, lead, sections, facts=facts, notices=list_gaps(results))


def _provenance(results: Results, runs: Sequence[Run]) -> Provenance:
    left_out = ("Models (weights)", "Precision")  # the document has them once, at its beginning
    facts = [(name, value) for name, value in list_facts(runs) if name not in left_out]
    return Provenance(format_command(results), facts)


def _table_sections(results: Results, printed: Printed | None) -> list[Section]:
    lines, sections = results.lines, list[Section]()

    def add(
        title: str,
        table: Table,
        text: str,
        columns: Sequence[Column] | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        """Add a section with a table, below the provenance of its runs."""
        runs = {id(run): run for line in lines for run in results.runs(line, columns, fresh=fresh)}
        provenance = _provenance(results, list(runs.values()))
        sections.append(Section(title, "", [provenance, add_caption(table, lines, text)]))

    conditions = results.conditions()
    if printed is not None and (table := paper_table(results, printed)).rows:
        slips = printed.slips()
        noted = f" Averages in the paper that do not match their rows: {'; '.join(slips)}." if slips else ""
        add("Next to the paper", table, _ABOUT_PAPER + noted)
    if len({line.rule for line in lines}) > 1:
        for metric, name in SHOWN.items():
            add(f"{name}: rules side by side", rules_table(results, metric), describe_metric(metric))
    add("All lines", summary_table(results), "Means over all columns.")
    for change in list_changes(results):
        add(change.title, change.table, change.text, change.columns, fresh=True)
    if len(conditions) > 1:
        for metric, name in SHOWN.items():
            add(f"{name} by condition", condition_table(results, metric), describe_metric(metric))
    for words, columns in conditions.items():
        for metric, name in SHOWN.items() if len(columns) > 1 else ():
            table = add_paper_rows(
                domain_table(results, columns, metric, ""), results, columns, metric, printed
            )
            title = f"{name} by domain{f', {words}' if words else ''}"
            add(title, table, describe_metric(metric), columns)
    for column in results.columns:
        visits = continual_table(results, column)
        if visits is not None:
            text = "Error in each domain in per cent."
            add(f"Domain after domain: {column.label}", visits, text, [column])
    return sections


def _comparison_sections(results: Results, comparisons: Sequence[PairedComparison]) -> list[Section]:
    if not comparisons:
        return []
    table = replace(comparison_table(results, comparisons), caption=COMPARISONS)
    return [Section("Paired comparisons", "", [_provenance(results, results.all_runs()), table])]


_ABOUT_PAPER = (
    "The paper's means are those of its rows for single corruptions where it prints them, and its ECE is that of "
    "single batches, averaged: compare it with our batch ECE. Its network was trained elsewhere."
)


def _figure_sections(results: Results, comparisons: Sequence[PairedComparison]) -> list[Section]:
    name, lines = results.study.recipe.name, pick_lines(results)
    provenance = _provenance(results, results.all_runs())
    figures: dict[str, Figure | None] = {
        "Error by condition": show_conditions_file(results, lines, f"{name}-conditions"),
        "Along the stream": show_stream_file(results, lines, f"{name}-curves"),
        "Paired differences": show_comparisons_file(results, comparisons, lines, f"{name}-paired"),
    }
    return [
        Section(title, "", [provenance, figure]) for title, figure in figures.items() if figure is not None
    ]


def render_index(several: Sequence[Results], printed: Mapping[str, Printed]) -> str:
    """Return the index of the folder, Markdown."""
    parts = [INTRODUCTION.strip()]
    if several:
        rows = []
        for results in several:
            runs, recipe = results.all_runs(), results.study.recipe
            gaps = results.study.missing + results.study.failed
            device, span = gather(runs, lambda run: run.facts.device), [run.facts.started for run in runs]
            rows.append(
                [
                    text_cell(recipe.title, link=f"{recipe.name}.md"),
                    *(Cell(f"{number:,}", number) for number in (len(runs), gaps)),
                    *map(text_cell, (device, format_span(span))),
                ]
            )
        parts += [
            to_markdown(Table(["study", "runs", "missing", "hardware", "measured"], rows)).strip(),
            "Runs: those that the tables show, without those that only chose settings.",
        ]
    else:
        parts.append("No rows yet.")
    if table := main_table(pick_main(several), printed):
        parts += ["## Main table", table.strip()]
    slips = [f"{name}, {slip}" for name, numbers in printed.items() for slip in numbers.slips()]
    if slips:
        text = "Averages in the paper that do not match their rows; our tables show the means of the rows:"
        parts += ["## Slips in the paper", "\n".join([text, "", *(f"- {slip}" for slip in slips)])]
    return "\n\n".join(parts) + "\n"


def pick_main(several: Sequence[Results]) -> list[Results]:
    """Return the studies of the main table, in its order."""
    found = {results.study.recipe.name: results for results in several}
    return [found[name] for name in MAIN if name in found]


def main_table(several: Sequence[Results], printed: Mapping[str, Printed]) -> str:
    """Return the main table, Markdown: for each study the paper's error, ours by two rules, and the ECE.

    Args:
        several: The studies, in order; those without runs are left out.
        printed: The paper's numbers by recipe.
    """
    shown = [results for results in several if results.all_runs()]
    if not shown:
        return ""
    labels = list(dict.fromkeys(line.label for results in shown for line in results.study.lines))
    blocks = [_main_cells(results, labels, printed.get(results.study.recipe.name)) for results in shown]
    rows = [[text_cell(label), *(cell for block in blocks for cell in block[label])] for label in labels]
    headings: list[str | Heading] = ["method"]
    headings += [heading for _ in shown for heading in ("paper", "grid-best", "validation", ECE.title)]
    spans = [("", 1)]
    for results in shown:
        spans += [(f"{_short_title(results)} error (%)", 3), (_short_title(results), 1)]
    text = to_markdown(Table(headings, rows, spans=spans, name="main", heads=True))
    return f"{text}\n{_EXPLAIN} {' '.join(_describe_origin(results) for results in shown)}\n"


_EXPLAIN = (
    "Mean over the corruptions, ± over seeds; lines without a grid have one setting, shown under both rules. grid-best "
    "takes the setting that is best on the reported data, as the paper does; validation takes the one that is best on "
    "held-out corruptions, and the ECE (over the whole stream) is that line's. Bold: the lowest of all; underlined: "
    "the lowest of those chosen without test labels, where that is another. Parts of ttvd's default (consensus loss, "
    "information maximization, a weight of 0.3) were first compared on these corruptions, so its setting is not free "
    "of selection."
)


def _main_cells(results: Results, labels: Sequence[str], printed: Printed | None) -> dict[str, list[Cell]]:
    """Return the four cells of each label in a study."""
    errors, eces = (cells_by_line(results, metric) for metric in (ERROR, ECE))
    found: dict[str, list[Cell]] = {}
    for label in labels:
        lines: dict[str, Line] = {line.rule: line for line in results.lines if line.label == label}
        best = lines.get("grid-best") or lines.get("last")
        fair = lines.get("validation") or lines.get("last")
        name = printed.find(next(iter(lines.values()))) if printed is not None and lines else None
        paper = NOT_ASKED if printed is None or name is None else _number(printed.mean("error", name))
        ours = [NOT_ASKED if line is None else errors[id(line)] for line in (best, fair)]
        found[label] = [paper, *ours, NOT_ASKED if fair is None else eces[id(fair)]]
    return found


def _describe_origin(results: Results) -> str:
    """Say in a sentence where the numbers of a study come from."""
    recipe, command = results.study.recipe, format_command(results)
    facts = dict(list_facts(results.all_runs()))
    words = [f"{facts['Runs']} runs", f"seeds {facts['Seeds']}"]
    words += [facts[name] for name in ("Data", "Precision", "Hardware", "Versions", "Measured")]
    return f"[{recipe.title}]({recipe.name}.md): `{command}`; {'; '.join(words)}."


def readme_table(several: Sequence[Results]) -> str:
    """Return the table of a README, Markdown: error and ECE of a few lines, by the rules without test labels.

    Args:
        several: The studies, in order; those without runs are left out.
    """
    shown = [results for results in several if results.all_runs()]
    columns: list[dict[str, Cell]] = []
    headings: list[str | Heading] = ["method"]
    for results in shown:
        lines = {line.label: line for line in results.lines if line.rule in ("last", "validation")}
        for metric in (ERROR, ECE):
            cells = cells_by_line(results, metric)
            column = {label: replace(cells[id(lines[label])], marked=False) for label in lines}
            lowest = min((float(column[n].value) for n in README_LINES if n in column), default=None)
            columns.append({n: replace(cell, best=cell.value == lowest) for n, cell in column.items()})
            headings.append(f"{_short_title(results)} {metric.title}")
    labels = [label for label in README_LINES if any(label in column for column in columns)]
    if not labels:
        return ""
    rows = [
        [text_cell(README_LINES[label]), *(column.get(label, NOT_ASKED) for column in columns)]
        for label in labels
    ]
    seeds = dict(list_facts([run for results in shown for run in results.all_runs()]))["Seeds"]
    links = ", ".join(f"[{_short_title(r)}](results/{r.study.recipe.name}.md)" for r in shown)
    text = (
        f"Means over the corruptions, ± over the seeds {seeds}. Lines with a grid take the setting that is best on "
        f"held-out corruptions. All lines, the paper's numbers, commands and hardware: {links}."
    )
    return f"{to_markdown(Table(headings, rows))}\n{text}\n"


def _short_title(results: Results) -> str:
    """Return the title of a study without what comes before its colon."""
    return results.study.recipe.title.rpartition(":")[2].strip()


def fill_markers(text: str, table: str) -> str:
    """Return a document with a table between its markers; without markers, or without a table, as it was.

    Raises:
        ValueError: One of the markers is missing, or they come more than once or in the wrong order.

    Example:
        >>> fill_markers(f"a\\n{BEGIN}\\nold\\n{END}\\nb", "| new |\\n").splitlines()[2:4]
        ['', '| new |']
    """
    if not table or (BEGIN not in text and END not in text):
        return text
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise ValueError(f"the table goes between {BEGIN} and {END}, each once and in this order")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"


@dataclass(frozen=True)
class Printed:
    """The numbers that the paper printed for one study, in per cent.

    Attributes:
        names: The paper's names for our methods.
        main: Numbers of its first table by its names: ``error``, ``ece`` and, for some, ``oracle``.
        rows: Numbers of each corruption, by metric (``error``, ``ece``) and name.
        averages: Printed averages of these rows, by metric and name.
    """

    names: Mapping[str, str]
    main: Mapping[str, Mapping[str, float]]
    rows: Mapping[str, Mapping[str, Mapping[str, float]]]
    averages: Mapping[str, Mapping[str, float]]

    def find(self, line: Line) -> str | None:
        """Return the paper's name of a line; None for a line that it does not have, such as a control."""
        name = self.names.get(line.method) if line.label == line.method else None
        known = {*self.main, *(name for rows in self.rows.values() for name in rows)}
        return name if name in known else None

    def mean(self, metric: str, name: str) -> float | None:
        """Return the mean of a row, whatever the paper prints as average; without a row, that of its first table."""
        row = self.rows.get(metric, {}).get(name)
        return statistics.fmean(row.values()) if row else self.main.get(name, {}).get(metric)

    def slips(self) -> list[str]:
        """Return the averages that do not match their rows: rounding can move each of the two by 0.05."""
        found = []
        for metric, rows in self.rows.items():
            for name, row in rows.items():
                mean, average = statistics.fmean(row.values()), self.averages[metric][name]
                if abs(mean - average) > 0.1:
                    found.append(
                        f"{name} ({metric}): it prints {average:.1f}, its row has the mean {mean:.2f}"
                    )
        return found


def read_paper(path: Path) -> dict[str, Printed]:
    """Read the numbers of a file such as results/paper.toml, by the recipe that they compare with.

    Raises:
        ValueError: A row does not have a number for each corruption.
    """
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    names, corruptions = document.pop("methods"), document.pop("corruptions")
    found: dict[str, Printed] = {}
    for title, part in document.items():
        recipes, main = part.pop("recipes"), part.pop("main", {})
        rows: dict[str, dict[str, dict[str, float]]] = {}
        for metric, table in part.items():
            for name, entry in table.items():
                if len(entry["row"]) != len(corruptions):
                    raise ValueError(
                        f"{path}: [{title}.{metric}] {name} has {len(entry['row'])} numbers for "
                        f"{len(corruptions)} corruptions"
                    )
                rows.setdefault(metric, {})[name] = dict(zip(corruptions, entry["row"], strict=True))
        averages = {
            metric: {name: e["average"] for name, e in table.items()} for metric, table in part.items()
        }
        found |= dict.fromkeys(recipes, Printed(names, main, rows, averages))
    return found


_PAPER_COLUMNS = (
    *(("error (%)", name) for name in ("paper", "grid-best", "validation", "paper, oracle", "oracle")),
    *(("ECE (%), grid-best", name) for name in ("paper", "batch ECE", "stream ECE")),
)
"""Groups and names of the columns of :func:`paper_table` after the first two."""


def paper_table(results: Results, printed: Printed) -> Table:
    """Return a row for each label that the paper has too: its numbers and ours, by the same rules."""
    cells = {metric.name: cells_by_line(results, metric) for metric in (ERROR, ECE, BATCH_ECE)}

    def ours(lines: Mapping[str, Line], metric: Metric, *rules: str) -> Cell:
        line = next((lines[rule] for rule in rules if rule in lines), None)
        return NOT_ASKED if line is None else cells[metric.name][id(line)]

    rows = []
    for label in dict.fromkeys(line.label for line in results.study.lines):
        lines: dict[str, Line] = {line.rule: line for line in results.lines if line.label == label}
        name = printed.find(next(iter(lines.values())))
        if name is not None:
            numbers = [
                _number(printed.mean("error", name)),
                ours(lines, ERROR, "grid-best", "last"),
                ours(lines, ERROR, "validation", "last"),
                _number(printed.main.get(name, {}).get("oracle")),
                ours(lines, ERROR, "oracle"),
                _number(printed.mean("ece", name)),
                ours(lines, BATCH_ECE, "grid-best", "last"),
                ours(lines, ECE, "grid-best", "last"),
            ]
            rows.append([text_cell(label), text_cell(name), *numbers])
    # Columns that are empty in all rows are left out.
    used = [0, 1, *(n for n in range(2, 2 + len(_PAPER_COLUMNS)) if any(row[n].value != "" for row in rows))]
    groups = groupby(_PAPER_COLUMNS[n - 2][0] for n in used[2:])
    spans = [("", 2), *((group, len(list(some))) for group, some in groups)]
    headings = ["method", "in the paper", *(_PAPER_COLUMNS[n - 2][1] for n in used[2:])]
    body = [[row[n] for n in used] for row in rows]
    return Table(headings, body, spans=spans, name=f"{results.study.recipe.name}-paper", heads=True)


def add_paper_rows(
    table: Table, results: Results, columns: Sequence[Column], metric: Metric, printed: Printed | None
) -> Table:
    """Add the paper's rows to a table of corruptions, each below our row of the same rule.

    Args:
        table: The table, as ``domain_table`` returns it.
        results: The study, whose lines are the rows of the table.
        columns: Columns of the table.
        metric: Metric of the table.
        printed: The paper's numbers; None leaves the table as it is.
    """
    parts = [split_severity(column.domain) for column in columns]
    ours_in_paper = {"error": "error", "batch_ece": "ece"}
    if printed is None or metric.name not in ours_in_paper or any(severity != "5" for _, severity in parts):
        return table
    places = {
        name: place
        for place, line in enumerate(results.lines)
        if line.rule in ("grid-best", "last") and (name := printed.find(line)) is not None
    }
    after = {place: name for name, place in places.items()}
    corruptions = [name.replace(" ", "_") for name, _ in parts]
    rows: list[Sequence[Cell]] = []
    for place, row in enumerate(table.rows):
        rows.append(row)
        numbers = printed.rows.get(ours_in_paper[metric.name], {}).get(after.get(place, ""), {})
        if numbers and set(corruptions) <= set(numbers):
            shown = [numbers[name] for name in corruptions]
            shown += [statistics.fmean(shown)] if len(shown) > 1 else []
            rows.append([*map(text_cell, (f"paper: {after[place]}", "grid-best")), *map(_number, shown)])
    return replace(table, rows=rows, tags=())


def _number(value: float | None) -> Cell:
    return MISSING if value is None else Cell(f"{value:.1f}", value)
