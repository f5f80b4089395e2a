"""The demo: a recipe on real digits that come with a dependency, run on this machine and shown as a page."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ttvd.bench.grid import Watcher
    from ttvd.bench.recipe import Recipe
    from ttvd.report.document import Table
    from ttvd.report.results import Results

RIVALS = ("source", "bn", "SLA + bn", "SLA + tent")
"""Lines that the demo compares with ttvd in words."""


@dataclass(frozen=True)
class Demo:
    """What a demo has made.

    Attributes:
        results: The numbers.
        page: Path of the page, which needs no other file and no network.
        store: Path of the store with all runs, for ``ttvd report`` and ``ttvd runs``.
    """

    results: Results
    page: Path
    store: Path


def read_demo_recipe(name: str = "demo", *, quick: bool = False, seed: int = 0) -> Recipe:
    """Read a recipe of the demo.

    Args:
        name: ``"demo"``, or ``"every-method"`` for all registered methods with their papers' defaults.
        quick: Whether to use a quarter of the stream.
        seed: Seed of the order of the stream and of the methods.
    """
    from ttvd.bench.recipe import cut_limit, cut_seeds, parse_recipe

    text = files("ttvd.demo").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    recipe = cut_seeds(parse_recipe(text, name), (seed,))
    return cut_limit(recipe, (recipe.data.limit or 2000) // 4) if quick else recipe


def run_demo(
    recipe: Recipe,
    out: Path,
    *,
    checkpoints: Path | None = None,
    jobs: int | None = None,
    watch: Watcher | None = None,
    progress: Callable[[str], None] | None = None,
) -> Demo:
    """Run a recipe on this machine and write its page and tables.

    Runs that the store in ``out`` has already are not done again.

    Args:
        recipe: The recipe, as :func:`read_demo_recipe` returns it.
        out: Folder for the store, the page and the tables.
        checkpoints: Folder of the source models; those of the package by default.
        jobs: Number of processes; one for each core by default.
        watch: Shows the progress of the runs.
        progress: Called with the name of each figure before it is computed.

    Raises:
        RuntimeError: A run or a figure failed; the message has its traceback.
    """
    from ttvd.bench.engines.local import LocalEngine
    from ttvd.bench.figures import make_figures
    from ttvd.bench.grid import run_grid
    from ttvd.bench.resources import Resources
    from ttvd.bench.spec import WorkerConfig
    from ttvd.bench.store import Store
    from ttvd.bench.study import study
    from ttvd.methods import list_methods
    from ttvd.report.html import write_report
    from ttvd.report.results import Results
    from ttvd.report.study import make_page

    out.mkdir(parents=True, exist_ok=True)
    config = WorkerConfig(checkpoints=None if checkpoints is None else checkpoints.resolve())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    path = out / f"{recipe.name}.db"
    with closing(LocalEngine(jobs or cores)) as engine, Store(path) as store:
        engine.start()  # workers load their libraries while the plan is made
        failed = dict(run_grid(recipe, store, engine, config, watch=watch).failed)
        failed |= make_figures(recipe, Resources(config), store, progress).failed
        if failed:
            name, text = next(iter(failed.items()))
            raise RuntimeError(
                f"{len(failed)} of the demo's runs and figures failed; the first, {name}:\n{text}"
            )
        summaries = {name: method.summary for name, method in list_methods().items()}
        page = write_report(make_page(store, [recipe.name], methods=summaries), out)[0]
        return Demo(Results(study(store, recipe.name)), page, path)


def demo_table(results: Results) -> Table:
    """Return a row for each line: error of each domain, their mean, ECE, time, share kept and peak memory."""
    from ttvd.report.document import MISSING, Cell
    from ttvd.report.results import ECE, ERROR
    from ttvd.report.tables import kept_cells, line_table, metric_cells, time_cells

    groups = [[column] for column in results.columns] if len(results.columns) > 1 else []
    cells = [metric_cells(results, group, ERROR) for group in [*groups, results.columns]]
    cells += [metric_cells(results, results.columns, ECE), time_cells(results), kept_cells(results)]
    peaks = [[run.facts.peak or 0 for run in results.runs(line)] for line in results.lines]
    cells.append([Cell(f"{max(peak) / 1e6:.0f}", max(peak)) if any(peak) else MISSING for peak in peaks])
    headings = [f"{column.domain} (%)" for (column,) in groups]
    headings += ["error (%)", "ECE (%)", "ms per image", "kept (%)", "peak MB"]
    return line_table(results, cells, headings, "table")


def compare_rivals(results: Results) -> list[str]:
    """Compare ttvd with each measured rival: the difference in error and its paired interval, in a sentence."""
    from ttvd.report.tables import VERDICTS, compare_lines

    sentences = []
    for rival in [line.label for line in results.lines if line.label in RIVALS]:
        for gap in [item.total for item in compare_lines(results, rival) if item.line.label == "ttvd"]:
            if gap is None:
                continue
            low, middle, high = (f"{100 * share:+.2f}" for share in (gap.low, gap.difference, gap.high))
            text = f"{middle} points of error, 95 % paired interval {low} to {high}: {VERDICTS[gap.verdict]}"
            sentences.append(f"ttvd against {rival}: {text}.")
    return sentences
