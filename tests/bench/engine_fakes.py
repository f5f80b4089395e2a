"""Jobs that misbehave on demand, an engine without processes, and a small real grid."""

import os
import resource
import signal
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ttvd.bench import Record, Row
from ttvd.bench.engines.events import Event, Job, Prepare, Shared
from ttvd.bench.engines.worker import Worker, prepare_bench
from ttvd.bench.grid import make_plans
from ttvd.bench.job import execute
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
    """A spec for the jobs below; the options say what its job does."""
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


def prepare_fake(setting: WorkerConfig, shared: Shared) -> Job:
    """A job that does what the options of its spec say."""
    return partial(_act, shared)


def _act(shared: Shared, spec: Spec, progress: Progress) -> Run:
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
        assert int(shared["digits"].images.sum()) == spec.options["sum"]
    if "pid" in spec.options:
        Path(spec.options["pid"]).write_text(str(os.getpid()))
    for number in range(2):
        progress(number + 1, 2)
        time.sleep(spec.options.get("nap", 0.0))
    return make_run(spec)


def prepare_slow(setting: WorkerConfig, shared: Shared) -> Job:
    """The real job, which takes its time over the first batch of Tent."""
    return partial(_dawdle, prepare_bench(setting, shared))


def _dawdle(job: Job, spec: Spec, progress: Progress) -> Run:
    def report(done: int, total: int) -> None:
        progress(done, total)
        if done == 1 and spec.method == "tent":
            time.sleep(0.7)

    return job(spec, report)


class PlainEngine:
    """One worker in this process."""

    def __init__(self, prepare: Prepare = prepare_fake) -> None:
        self._prepare = prepare
        self.closed = False

    def start(self) -> None:
        pass

    def run(
        self, specs: Iterable[Spec | None], setting: WorkerConfig, shared: Shared | None = None
    ) -> Generator[Event, None, None]:
        worker = Worker("plain", self._prepare, setting, shared or {})
        try:
            for spec in specs:
                events: list[Event] = []
                if spec is None:
                    time.sleep(0.05)
                    continue
                worker.do(spec.key, spec, events.append)
                yield from events
        finally:
            self.closed = True

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
    return {spec.key: execute(spec, resources) for spec in specs}


def strip(run: Run) -> list[tuple[Any, ...]]:
    """All of the rows but their time."""
    return [(row.metrics, row.kept, row.domain) for row in run.record.rows]
