"""A folder of results that can be committed: documents and figures, made anew from the packed runs that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ttvd.bench.recipe import parse_recipe
from ttvd.bench.recipe.planning import list_entries
from ttvd.bench.store.pack import Pack
from ttvd.bench.study import study
from ttvd.files import open_atomic
from ttvd.report.main_table import BEGIN, END, MAIN, fill_markers, main_table
from ttvd.report.markdown import MADE, render_results
from ttvd.report.paper import read_paper
from ttvd.report.provenance import gather, show_span
from ttvd.report.results import Results

if TYPE_CHECKING:
    from ttvd.report.paper import Printed

INTRODUCTION = f"""{MADE}
# Results

`make results` makes every document and figure here from the rows in `rows/`, offline, and gives the same bytes
each time. `rows/NAME.csv` has a line for each run: its spec, the circumstances, the sums that all numbers come from,
and a digest; `rows/NAME.toml` is the recipe. [paper.toml](paper.toml) has the paper's numbers.

```sh
ttvd bench recipes/NAME.toml --store out/NAME.db  # measure; see docs/benchmark.md
ttvd runs out/NAME.db --pack results/rows         # take the runs over; those that are there already stay
make results
ttvd report results/rows/NAME.csv --out out/NAME  # a page to explore
ttvd runs out/mine.db --unpack results/rows/NAME.csv  # go on from these runs, e.g. with a method of yours
```
"""
_BEGINNING = 200  # bytes of a file in which its mark must stand


def write_results(folder: Path, readme: Path | None = None) -> list[Path]:
    """Make all documents and figures of a folder, and the main table of a README.

    Args:
        folder: Holds ``rows/*.csv`` and ``paper.toml``.
        readme: Document with the markers of the main table.

    Returns:
        What was written.

    Raises:
        ValueError: Rows are damaged, or do not fit their recipe; nothing has been written.
    """
    printed = read_paper(folder / "paper.toml")
    several = [read_study(path) for path in list_rows(folder)]
    files: dict[Path, bytes] = {}
    for results in several:
        name = results.study.recipe.name
        text, pictures = render_results(results, printed.get(name))
        files[folder / f"{name}.md"] = text.encode()
        files |= {folder / "figures" / title: content for title, content in pictures.items()}
    files[folder / "README.md"] = render_index(several, printed).encode()
    if readme is not None:
        text = readme.read_text(encoding="utf-8")
        filled = fill_markers(text, main_table(pick_main(several), printed))
        files |= {readme: filled.encode()} if filled != text else {}
    for path in _list_made(folder):
        if path not in files:
            path.unlink()
    for path, content in files.items():
        with open_atomic(path, sync=False) as file:
            file.write(content)
    return list(files)


def list_rows(folder: Path) -> list[Path]:
    """The files of packed runs in a folder of results, by name."""
    return sorted((folder / "rows").glob("*.csv"))


def read_study(path: Path) -> Results:
    """The study of a file of packed runs.

    Raises:
        ValueError: It is damaged, or its recipe asks for lines that it does not have.
    """
    pack = Pack(path)
    wanted = {entry.label for entry in list_entries(parse_recipe(pack.recipes()[pack.name], pack.name))}
    there = {member.label for member in pack.members(pack.name)}
    if wanted != there:
        odd = ", ".join(sorted(wanted ^ there))
        raise ValueError(f"{path} and its recipe {pack.name}.toml do not fit: lines that only one has: {odd}")
    return Results(study(pack, pack.name))


def pick_main(several: Sequence[Results]) -> list[Results]:
    """The studies of the main table, in its order."""
    found = {results.study.recipe.name: results for results in several}
    return [found[name] for name in MAIN if name in found]


def render_index(several: Sequence[Results], printed: dict[str, Printed]) -> str:
    """The document that leads to the others."""
    parts = [INTRODUCTION.strip()]
    if several:
        lines = ["| study | runs | missing | hardware | measured |", "|---|---:|---:|---|---|"]
        for results in several:
            runs, recipe = results.all_runs(), results.study.recipe
            words = [
                gather(runs, lambda run: run.facts.device),
                show_span([run.facts.started for run in runs]),
            ]
            gaps = results.study.missing + results.study.failed
            lines.append(
                f"| [{recipe.title}]({recipe.name}.md) | {len(runs):,} | {gaps:,} | {' | '.join(words)} |"
            )
        parts += [
            "\n".join(lines),
            "Runs: those that the tables show; those that only chose settings come on top.",
        ]
    else:
        parts.append("No rows yet.")
    parts.append(f"The main table of the project's README stands between `{BEGIN}` and `{END}` there.")
    slips = [f"{name}, {slip}" for name, numbers in printed.items() for slip in numbers.slips()]
    if slips:
        text = "The paper's averages that do not match their rows; our tables show the means of the rows:"
        parts.append("\n".join([text, "", *(f"- {slip}" for slip in slips)]))
    return "\n\n".join(parts) + "\n"


def _list_made(folder: Path) -> list[Path]:
    """What was made before: documents and figures that say so at their beginning, and nobody else's."""
    paths = [*folder.glob("*.md"), *(folder / "figures").glob("*.svg")]
    return [path for path in paths if path.is_file() and MADE.encode() in path.read_bytes()[:_BEGINNING]]
