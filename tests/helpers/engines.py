"""Runs that misbehave on demand, an engine without processes, and a small real grid."""

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ttvd.bench import Record, Row
from ttvd.bench.engines import Event, Shared, WorkerPool
from ttvd.bench.engines.worker import DoRun, Worker
from ttvd.bench.grid import make_plans
from ttvd.bench.job import execute as do_run
from ttvd.bench.recipe import Recipe, parse_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import Domain, Facts, Member, Run, Spec, WorkerConfig
from ttvd.metrics import RunningMetrics

Progress = Callable[[int, int], None]
SMALL = """
title = "Two methods"
data = {set = "digits", corruptions = ["gaussian_noise"], constants = "imagenet", limit = 128}
checkpoints = {plain = "digits-plain"}
methods = [{name = ["bn", "tent"]}]
"""


def make_spec(seed: int = 0, method: str = "tent", **options: Any) -> Spec:
    """A spec for :func:`do_fake`; the options say what happens in the run."""
    return Spec(
        "digits-plain", "0" * 16, "digits", "1" * 16, (Domain("fog"),), method, options=options, seed=seed
    )


def make_run(spec: Spec) -> Run:
    """A run with one batch that depends on the seed."""
    metrics = RunningMetrics()
    logits = torch.randn(8, 3, generator=torch.Generator().manual_seed(spec.seed))
    metrics.update(torch.zeros(8).long(), logits=logits)
    facts = Facts("5f3a", "cpu", 1, {}, 1.7e9, 0.1, None, 1.0, 0.0)
    return Run(spec, Record((Row(metrics.state(), 1.0, 0.01),)), facts)


def do_fake(spec: Spec, resources: Resources, progress: Progress) -> Run:
    """Do what the options of a spec say."""
    act = spec.options.get("act")
    if act == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "raise":
        raise RuntimeError("broken on purpose")
    if act == "eat":
        room = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 33, room[1]))
        bytearray(1 << 34)
    if act == "shared":
        assert int(resources.shared()["digits"].images.sum()) == spec.options["sum"]
    if "pid" in spec.options:
        Path(spec.options["pid"]).write_text(str(os.getpid()))
    for number in range(2):
        progress(number + 1, 2)
        time.sleep(spec.options.get("nap", 0.0))
    return make_run(spec)


def do_slowly(spec: Spec, resources: Resources, progress: Progress) -> Run:
    """Do the real run, with a pause after the first batch of Tent."""

    def report(done: int, total: int) -> None:
        progress(done, total)
        if done == 1 and spec.method == "tent":
            time.sleep(0.7)

    return do_run(spec, resources, report)


class PlainEngine(WorkerPool):
    """One worker in this process."""

    def __init__(self, do_run: DoRun = do_fake) -> None:
        self._do_run = do_run
        self._events: list[Event] = []
        self.closed = False

    def _prepare(self, config: WorkerConfig, shared: Shared) -> Iterator[Event]:
        self._worker = Worker("plain", self._do_run, config, shared)
        yield from ()

    def _has_free_worker(self) -> bool:
        return not self._events

    def _is_busy(self) -> bool:
        return bool(self._events)

    def _submit(self, spec: Spec) -> None:
        self._worker.run(spec.key, spec, self._events.append)

    def _collect(self, seconds: float) -> Iterator[Event]:
        if not self._events:
            time.sleep(0.05)
        events, self._events = self._events, []
        yield from events

    def close(self) -> None:
        self.closed = True


def plan_small() -> tuple[Recipe, list[Member], Shared]:
    """Two methods on 128 noisy digits."""
    recipe = parse_recipe(SMALL, "small")
    [(_, members)], shared = make_plans([recipe], WorkerConfig())
    return recipe, list(members), shared


def do_here(specs: Sequence[Spec]) -> dict[str, Run]:
    """The same runs without any engine."""
    resources = Resources(WorkerConfig())
    return {spec.key: do_run(spec, resources) for spec in specs}


def strip(run: Run) -> list[tuple[Any, ...]]:
    """All of the rows but their time."""
    return [(row.metrics, row.kept, row.domain) for row in run.record.rows]
