"""The wall time of table 1 on CIFAR-10-C, and of one full run of TTVD.

    python -m benchmarks.table1 --data DATA --checkpoints CHECKPOINTS --device cuda
    python -m benchmarks.table1 --data DATA --checkpoints CHECKPOINTS --parts run --precision bfloat16
    python -m benchmarks.table1 --data DATA --checkpoints CHECKPOINTS --limit 256 --corruptions fog --methods tent ttvd

*table*: all lines of `recipes/table1-cifar10.toml` at the learning rates of their grids and 15 corruptions, one seed,
the setting of the last iterate (neither oracle nor validation runs), through the planning and the loop that make every
table; in this process, or with `--jobs` by several. *run*: TTVD with its defaults over 15 x 10,000 images in four
views, metrics included: as 15 runs that each start afresh, and as one stream of 15 corruptions. Corruptions are made on
the device; in *table* that counts, in *run* it is told apart, as is compiling. Lines whose checkpoint or source data
are missing are left out and named; methods without a need of their own use the label-augmented model where the plain
one is missing, which costs the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from benchmarks.clock import describe_device, find_device
from benchmarks.table import Row, Table

from ttvd.bench import job
from ttvd.bench.engines import Finished
from ttvd.bench.engines.local import LocalEngine
from ttvd.bench.grid import run_plans
from ttvd.bench.plan import plan
from ttvd.bench.recipe import MethodPart, Recipe, read_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.run import Record
from ttvd.bench.spec import Domain, Member, Spec, WorkerConfig
from ttvd.bench.store import Store
from ttvd.data.corruptions import CORRUPTIONS
from ttvd.methods import find_method

RECIPE = Path(__file__).parents[1] / "recipes" / "table1-cifar10.toml"
SLA = "resnet26-cifar10-sla"


@dataclass
class Spent:
    """Cost of the runs of a line.

    Attributes:
        runs: Number of runs.
        images: Number of images in all runs.
        seconds: Time from building the adapter to the last score; with several processes, without building it.
        batches: Number of batches.
        steps: Seconds spent in the adapter.
        wrong: Number of images with a wrong prediction.
    """

    runs: int = 0
    images: float = 0.0
    seconds: float = 0.0
    batches: int = 0
    steps: float = 0.0
    wrong: float = 0.0

    def add(self, record: Record, seconds: float) -> None:
        """Count a run."""
        self.runs += 1
        self.seconds += seconds
        self.batches += len(record.rows)
        self.images += float(record.sizes().sum())
        self.steps += sum(row.seconds for row in record.rows)
        self.wrong += float(record.wrong().sum())

    def row(self, group: str, name: str, note: str = "") -> Row:
        """For the table."""
        text = f"{self.seconds:.1f} s{note}"
        steps = 1e3 * self.steps / self.batches
        rate = self.images / self.seconds if self.seconds else None
        return Row(group, name, f"{self.runs} runs", ms=steps, images=rate, note=text)

    def describe(self, making: float) -> str:
        """Remark for a run of one setting."""
        return f" and {making:.1f} s to corrupt, error {100 * self.wrong / self.images:.2f} %"


def time_run(spec: Spec, resources: Resources) -> tuple[Record, float]:
    """Do a run as a worker does it; returns its seconds too."""
    start = time.perf_counter()
    record = job.execute(spec, resources).record
    return record, time.perf_counter() - start


def cut_recipe(args: argparse.Namespace, table: Table) -> Recipe:
    """The recipe of the table, without what is missing here."""
    recipe = read_recipe(RECIPE)
    places = dict(recipe.checkpoints)
    if not _has(args.checkpoints, places["plain"]):
        places["plain"] = SLA
        table.note(f"Methods without a need of their own run on {SLA}: the plain model is missing.")
    parts = [_cut_line(part, places, args, table) for part in recipe.methods]
    kept = tuple(part for part in parts if part.name)
    return replace(_cut_data(recipe, args), rules=None, seeds=(0,), checkpoints=places, methods=kept)


def _cut_line(
    part: MethodPart, places: Mapping[str, str], args: argparse.Namespace, table: Table
) -> MethodPart:
    names = []
    for name in part.name:
        if args.methods is not None and (part.label or name) not in args.methods:
            continue
        needs = find_method(name).needs & set(places)
        if missing := [places[need] for need in sorted(needs) if not _has(args.checkpoints, places[need])]:
            table.note(f"{name} is left out: its model, {missing[0]}, is missing.")
        else:
            names.append(name)
    return replace(part, name=tuple(names), seeds=None, rules=None)


def _cut_data(recipe: Recipe, args: argparse.Namespace) -> Recipe:
    data = replace(recipe.data, limit=args.limit, corruptions=tuple(args.corruptions))
    return replace(recipe, data=data, precision=args.precision, reference=None)


def _plan_on_cpu(resources: Resources) -> Resources:
    return Resources(replace(resources.config, device="cpu"), resources.shared())


def _has(folder: Path, name: str) -> bool:
    return (folder / f"{name}.safetensors").is_file()


def measure_table(args: argparse.Namespace, table: Table, resources: Resources) -> Iterator[Row]:
    """All lines of the table."""
    recipe = cut_recipe(args, table)
    members = plan(recipe, _plan_on_cpu(resources))
    spent: dict[str, Spent] = {}
    start = time.perf_counter()
    if args.jobs:
        _run_by_workers(recipe, members, resources.config, args.jobs, spent, args.store)
    else:
        for member in members:
            spent.setdefault(member.label, Spent()).add(*time_run(member.spec, resources))
    wall = time.perf_counter() - start
    for label, line in spent.items():
        yield line.row("table 1, CIFAR-10-C", label)
    images = sum(line.images for line in spent.values())
    runs = sum(line.runs for line in spent.values())
    yield Row("table 1, CIFAR-10-C", "all of it", f"{runs} runs", images=images / wall, note=f"{wall:.1f} s")


def _run_by_workers(
    recipe: Recipe,
    members: list[Member],
    setting: WorkerConfig,
    jobs: int,
    spent: dict[str, Spent],
    kept: Path | None,
) -> None:
    labels = {member.spec.key: member.label for member in members}

    class Watch:
        def begin(self, missing: object, skipped: int) -> None:
            pass

        def see(self, event: object) -> None:
            if isinstance(event, Finished):
                done = event.run
                spent.setdefault(labels[event.key], Spent()).add(done.record, done.facts.seconds)

    with tempfile.TemporaryDirectory() as folder, Store(kept or Path(folder) / "runs.sqlite") as store:
        if done := store.done():
            raise ValueError(
                f"{kept} has {len(done)} runs already: give a new file, or what is timed is not all of it"
            )
        engine = LocalEngine(jobs, [setting.device])
        run_plans([(recipe, members)], store, engine, setting, watch=Watch())


def measure_run(args: argparse.Namespace, resources: Resources) -> Iterator[Row]:
    """TTVD with its defaults over all corruptions: afresh for each, and as one stream."""
    group = "a full run of ttvd"
    recipe = _cut_data(replace(read_recipe(RECIPE), rules=None, grid={}, params={}, seeds=(0,)), args)
    recipe = replace(recipe, methods=(MethodPart(("ttvd",)),))
    specs = [member.spec for member in plan(recipe, _plan_on_cpu(resources))]
    apart, making, compiling = Spent(), _make_images(specs[0], resources), ""
    if resources.config.compiled:
        # Twice: a shape is compiled when it comes again, and the last batch is a short one.
        spent = sum(time_run(specs[0], resources)[1] for _ in range(2))
        compiling = f", {spent:.0f} s to compile before"
    for spec in specs:
        making += _make_images(spec, resources)
        apart.add(*time_run(spec, resources))
    yield apart.row(group, "one run each", apart.describe(making) + compiling)
    whole = replace(specs[0], domains=tuple(Domain(name, 5) for name in args.corruptions))
    making, stream = _make_images(whole, resources), Spent()
    stream.add(*time_run(whole, resources))
    yield stream.row(group, "one stream", stream.describe(making))


def _make_images(spec: Spec, resources: Resources) -> float:
    """Corrupt the images of a run; returns the seconds."""
    start = time.perf_counter()
    for domain in spec.domains:
        resources.batch(spec, domain, torch.tensor([0])).cpu()
    return time.perf_counter() - start


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    setting = WorkerConfig(
        data=args.data,
        checkpoints=args.checkpoints,
        device=str(find_device(args.device)),
        threads=args.threads,
        compiled=args.compile,
    )
    torch.set_num_threads(args.threads)
    resources = Resources(setting)
    torch.backends.cudnn.benchmark = args.tune
    how = [
        args.precision,
        *(word for word, is_so in (("tuned", args.tune), ("compiled", args.compile)) if is_so),
    ]
    table = Table(f"CIFAR-10-C on {describe_device(resources.device)}, {', '.join(how)}.")
    if "run" in args.parts:
        table.extend(measure_run(args, resources))
    if "table" in args.parts:
        table.extend(measure_table(args, table, resources))
    table.close(args.out)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of CIFAR-10")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of the source models")
    parser.add_argument("--parts", nargs="+", default=["table", "run"], choices=("table", "run"))
    parser.add_argument("--methods", nargs="+", help="lines of the table; all unless given")
    parser.add_argument("--corruptions", nargs="+", default=list(CORRUPTIONS), choices=list(CORRUPTIONS))
    parser.add_argument("--limit", type=int, help="images of a run; all unless given")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0 is this one")
    parser.add_argument(
        "--store", type=Path, help="with --jobs: keep the runs in this file, for `ttvd bench`"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--tune", action="store_true", help="torch.backends.cudnn.benchmark = True, in this process"
    )
    parser.add_argument("--compile", action="store_true", help="fuse steps by torch.compile")
    parser.add_argument("--out", type=Path, help="CSV file")
    found = parser.parse_args(arguments)
    if found.store is not None and not found.jobs:
        parser.error("--store needs --jobs: runs in this process are not stored")
    return found


if __name__ == "__main__":
    main()
