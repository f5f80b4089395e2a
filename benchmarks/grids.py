"""A grid of real runs by processes of this machine and by Ray: how much of the workers' time goes into runs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.table import Row

from ttvd.bench.engines import Engine, Finished
from ttvd.bench.engines.local import LocalEngine
from ttvd.bench.engines.ray import RayEngine
from ttvd.bench.grid import make_plans, run_plans
from ttvd.bench.recipe import parse_recipe
from ttvd.bench.spec import WorkerConfig
from ttvd.bench.store import Store

RECIPE = """
title = "Efficiency"
seeds = {seeds}
[data]
set = "digits"
corruptions = ["gaussian_noise"]
constants = "imagenet"
limit = {limit}
[checkpoints]
plain = "digits-plain"
[stream]
batch_size = 16
[[methods]]
name = "tent"
"""


class Watch:
    """Adds up the time that workers spend in runs."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def begin(self, missing: object, skipped: int) -> None:
        """Nothing to show."""

    def see(self, event: object) -> None:
        """Count a finished run."""
        if isinstance(event, Finished):
            self.seconds += event.run.facts.seconds


def measure_grid(kind: str, jobs: tuple[int, ...], runs: int, limit: int) -> Iterator[Row]:
    """The same grid by more and more workers.

    Args:
        kind: ``"processes"`` or ``"Ray"``.
        jobs: Numbers of workers.
        runs: Number of runs in the grid.
        limit: Images of a run.
    """
    for count in jobs:
        engine: Engine = LocalEngine(count) if kind == "processes" else RayEngine(jobs=count)
        wall, busy = run_once(engine, runs, limit)
        rate, share = limit * runs / wall, busy / (count * wall)
        note = f"{wall:.1f} s for {runs} runs, efficiency {share:.2f}"
        yield Row("grid", kind, f"{count} jobs", ms=1e3 * wall / runs, images=rate, note=note)


def run_once(engine: Engine, runs: int, limit: int) -> tuple[float, float]:
    """Seconds that a grid takes, and those that its workers spend in runs, added up."""
    text = RECIPE.format(seeds=list(range(runs)), limit=limit)
    setting = WorkerConfig(threads=1)
    plans, shared = make_plans([parse_recipe(text, "efficiency")], setting)
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "runs.sqlite") as store:
        start = time.perf_counter()
        outcome = run_plans(plans, store, engine, setting, shared=shared, watch=watch)
        wall = time.perf_counter() - start
    if outcome.done != runs:
        raise RuntimeError(f"{runs} runs were asked for: {outcome}")
    return wall, watch.seconds
