"""The main table for a README: several studies side by side, next to the paper, between two markers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ttvd.report.export import to_markdown
from ttvd.report.page import Cell, Heading, Table
from ttvd.report.paper import show_printed
from ttvd.report.provenance import sum_up
from ttvd.report.results import ECE, ERROR
from ttvd.report.tables import ABSENT, metric_cells

if TYPE_CHECKING:
    from ttvd.bench.study import Line
    from ttvd.report.paper import Printed
    from ttvd.report.results import Results

MAIN = ("table1-cifar10", "table1-cifar100")
"""Recipes whose studies the table shows, as far as there are runs."""

BEGIN, END = "<!-- main table: begin -->", "<!-- main table: end -->"


def main_table(several: Sequence[Results], printed: Mapping[str, Printed]) -> str:
    """Markdown: a row for each label, and for each study the paper's error, ours by two rules, and the ECE.

    Args:
        several: The studies, in order; those without runs are left out.
        printed: The paper's numbers by recipe.
    """
    shown = [results for results in several if results.all_runs()]
    if not shown:
        return ""
    labels = list(dict.fromkeys(line.label for results in shown for line in results.study.lines))
    blocks = [_list_cells(results, labels, printed.get(results.study.recipe.name)) for results in shown]
    rows = [[Cell(label, label), *(cell for block in blocks for cell in block[label])] for label in labels]
    headings: list[str | Heading] = ["method"]
    headings += [heading for _ in shown for heading in ("paper", "grid-best", "validation", ECE.title)]
    spans = [("", 1)]
    for results in shown:
        title = results.study.recipe.title.rpartition(":")[2].strip()
        spans += [(f"{title} error (%)", 3), (title, 1)]
    text = to_markdown(Table(headings, rows, spans=spans, name="main", heads=True))
    return f"{text}\n{_EXPLAIN} {' '.join(_tell(results) for results in shown)}\n"


_EXPLAIN = (
    "Mean over the corruptions, ± over seeds; lines without a grid have one setting, shown under both rules. grid-best "
    "takes the setting that is best on the reported data, as the paper does; validation takes the one that is best on "
    "held-out corruptions, and the ECE (over the whole stream) is that line's. Bold: the lowest of all; underlined: "
    "the lowest of those chosen without test labels, where that is another."
)


def _list_cells(results: Results, labels: Sequence[str], printed: Printed | None) -> dict[str, list[Cell]]:
    """The four cells of each label in a study."""
    errors, eces = (
        dict(zip(map(id, results.lines), metric_cells(results, results.columns, metric), strict=True))
        for metric in (ERROR, ECE)
    )
    found: dict[str, list[Cell]] = {}
    for label in labels:
        lines: dict[str, Line] = {line.rule: line for line in results.lines if line.label == label}
        best = lines.get("grid-best") or lines.get("last")
        fair = lines.get("validation") or lines.get("last")
        found[label] = [
            show_printed(printed, "error", next(iter(lines.values()), None)),
            ABSENT if best is None else errors[id(best)],
            ABSENT if fair is None else errors[id(fair)],
            ABSENT if fair is None else eces[id(fair)],
        ]
    return found


_TOLD = {"Runs": "{} runs", "Seeds": "seeds {}"} | dict.fromkeys(
    ("Data", "Precision", "Hardware", "Versions", "Measured"), "{}"
)


def _tell(results: Results) -> str:
    """Where the numbers of a study come from, in a sentence."""
    name = results.study.recipe.name
    (_, command), *facts = sum_up(results, results.all_runs())
    told = [_TOLD[title].format(value) for title, value in facts if title in _TOLD]
    words = "; ".join(told)
    return f"[{results.study.recipe.title}](results/{name}.md): `{command}`; {words}."


def fill_markers(text: str, table: str) -> str:
    """A document with the table between its markers; without markers, or without a table, as it was.

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
