"""``ttvd bench``: the runs of recipes, on this machine or on a cluster, into a store."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ttvd.bench.engines import Engine
    from ttvd.bench.grid import Outcome, Plan
    from ttvd.bench.recipe import Recipe
    from ttvd.bench.spec import Spec
    from ttvd.bench.store import Store
    from ttvd.bench.worker_config import WorkerConfig

_MOST_COLUMNS = 6  # of single domains in the table of a recipe; the page shows all


def bench(
    recipes: list[Path] = typer.Argument(help="Recipes, TOML files."),
    store: Path = typer.Option(
        Path("out/bench.db"), help="File that keeps the runs; made if it is not there."
    ),
    data: Path | None = typer.Option(None, help="Folder of data sets, as for `ttvd data get --root`."),
    checkpoints: Path | None = typer.Option(
        None, help="Folder of source models; the package's own if not given."
    ),
    device: str = typer.Option("cpu", help="cpu, cuda (all GPUs in turn) or cuda:N."),
    engine: str = typer.Option("local", help="Who does the runs: local (processes here) or ray."),
    jobs: int | None = typer.Option(
        None, min=1, help="Runs at the same time; one for each core or GPU if not given."
    ),
    threads: int = typer.Option(1, min=1, help="Threads of a run on a CPU."),
    compiled: bool = typer.Option(
        False,
        "--compile",
        help="Fuse steps by torch.compile, once for each setting and size of batch: for long streams on a GPU.",
    ),
    address: str | None = typer.Option(
        None, help="With ray: a cluster, auto or HOST:6379; one here if not given."
    ),
    gpus: float = typer.Option(1.0, help="With ray and cuda: share of a GPU for each run, e.g. 0.25."),
    limit: int | None = typer.Option(None, min=1, help="Use only so many images of each set, for a trial."),
    seeds: str | None = typer.Option(None, help="Instead of the recipe's: 0,1,2"),
    only: list[str] | None = typer.Option(None, help="Only the line of this label; repeat for more."),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Check everything, show what would be done, and stop."
    ),
) -> None:
    """Do all runs of recipes that the store does not have.

    Killed at any moment and started again, it goes on where it was. Exit codes: 0 all runs are done, 1 some have
    failed, 2 the input cannot be used, 130 interrupted.
    """
    from rich.console import Console

    from ttvd.bench.grid import make_plans
    from ttvd.bench.interrupt import raise_interrupts

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 200)  # for a pipe or a file nothing need be cut off
    if gpus <= 0:
        raise ValueError(f"--gpus is a share of a GPU above 0, e.g. 0.25; got {gpus:g}")
    if address is not None and engine != "ray":
        raise ValueError("--address goes with --engine ray")
    found = _read(recipes, limit, seeds, only)
    setting = _make_setting(data, checkpoints, device, threads, engine, compiled)
    try:
        with raise_interrupts():
            if dry_run:
                _show_plans(make_plans(found, setting)[0], store, console)
                return
            chosen = _make_engine(engine, jobs, setting, address, gpus)
            failed = _run(found, store, chosen, setting, console)
    except KeyboardInterrupt:
        text = (
            f"Interrupted. All runs that were finished are in {store}; the same command goes on from there."
        )
        console.print(text, soft_wrap=True, highlight=False, markup=False)
        raise typer.Exit(130) from None
    if failed:
        raise typer.Exit(1)


def _read(
    paths: list[Path], limit: int | None, seeds: str | None, only: list[str] | None = None
) -> "list[Recipe]":
    """The recipes with what the command line changes of them."""
    from ttvd.bench.recipe import read_recipe
    from ttvd.bench.recipe.cut import cut_limit, cut_lines, cut_seeds

    recipes = [read_recipe(path) for path in paths]
    names = [recipe.name for recipe in recipes]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"two recipes are called {twice[0]}: the store tells them apart by their file's name"
        )
    if limit is not None:
        recipes = [cut_limit(recipe, limit) for recipe in recipes]
    if seeds is not None:
        numbers = _parse_seeds(seeds)
        recipes = [cut_seeds(recipe, numbers) for recipe in recipes]
    return [cut_lines(recipe, only) for recipe in recipes] if only else recipes


def _parse_seeds(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = (-1,)
    if min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise ValueError(f"--seeds takes different whole numbers from 0 on, e.g. 0,1,2; got {text!r}")
    return numbers


def _make_setting(
    data: Path | None, checkpoints: Path | None, device: str, threads: int, engine: str, compiled: bool
) -> "WorkerConfig":
    from ttvd.bench.worker_config import WorkerConfig
    from ttvd.cli.arguments import check_device
    from ttvd.cli.extras import require

    if engine not in ("local", "ray"):
        raise ValueError(f"--engine is local or ray, got {engine!r}")
    for name, folder in (("--data", data), ("--checkpoints", checkpoints)):
        if folder is not None and not folder.is_dir():
            raise NotADirectoryError(f"{name}: there is no folder {folder}")
    if engine == "ray":
        require("ray", "ray")  # its nodes have the GPUs, not necessarily this one
    else:
        check_device(device)
    # Absolute, since workers of a cluster have another working directory.
    folders = data and data.resolve(), checkpoints and checkpoints.resolve()
    return WorkerConfig(*folders, device, threads, compiled)


def _make_engine(
    engine: str, jobs: int | None, setting: "WorkerConfig", address: str | None, gpus: float
) -> "Engine":
    import os

    import torch

    from ttvd.bench.engines import LocalEngine, RayEngine

    if engine == "ray":
        return RayEngine(address, jobs, gpus)
    if setting.device == "cuda":
        devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    else:
        devices = [setting.device]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(1, cores // setting.threads) if setting.device == "cpu" else len(devices)
    return LocalEngine(jobs or most, devices)


def _run(
    recipes: "list[Recipe]", path: Path, engine: "Engine", setting: "WorkerConfig", console: "Console"
) -> bool:
    """Do the runs and say what came out; whether some have failed."""
    from contextlib import closing

    from ttvd.bench.grid import make_plans, run_plans
    from ttvd.bench.store import Store

    with closing(engine):
        engine.start()  # workers load their libraries while the plan is made
        plans, shared = make_plans(recipes, setting)
        _make_folder(path)
        with Store(path) as store:
            with Bars(console) if console.is_terminal else Lines(console) as watch:
                outcome = run_plans(plans, store, engine, setting, shared=shared, watch=watch)
            lost = [text for recipe in recipes for text in _make_figures(recipe, store, setting, console)]
            for recipe in recipes:
                _show_study(store, recipe.name, console)
    specs = {member.spec.key: member.spec for _, members in plans for member in members}
    _conclude(outcome, specs, path, console)
    for text in lost:
        console.print(text, soft_wrap=True, highlight=False, markup=False)
    return bool(outcome.failed or lost)


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--store {path}: its folder cannot be made ({error}); give a path in a folder that can be written"
        ) from error


def _make_figures(recipe: "Recipe", store: "Store", setting: "WorkerConfig", console: "Console") -> list[str]:
    """Make the figures of a recipe that the store does not have; what went wrong, with the traceback."""
    from dataclasses import replace

    import torch

    from ttvd.bench.figures import make_figures
    from ttvd.bench.resources import Resources

    if not recipe.figures:
        return []
    if not torch.cuda.is_available():  # it is the nodes of a cluster that have the GPUs
        setting = replace(setting, device="cpu")
    with console.status("Making figures") as status:
        made = make_figures(
            recipe,
            Resources(setting),
            store,
            lambda name: status.update(f"Making figure {name} of {recipe.name}"),
        )
    return [
        f"  failed: figure {name} of {recipe.name}: {text.strip().splitlines()[-1]}\n{text}"
        for name, text in made.failed.items()
    ]


def _conclude(outcome: "Outcome", specs: "dict[str, Spec]", path: Path, console: "Console") -> None:
    from ttvd.cli.bench_progress import count_runs, describe

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    words = [f"{count_runs(outcome.done)} done"]
    words += [f"{outcome.elsewhere} done by another process"] if outcome.elsewhere else []
    words += [f"{outcome.skipped} were there before"] if outcome.skipped else []
    words += [f"{len(outcome.failed)} failed"] if outcome.failed else []
    say(", ".join(words) + f". The store: {path}")
    for key, text in outcome.failed.items():
        say(f"  failed: {describe(specs[key])}: {text.strip().splitlines()[-1]}")
        say(f"          ttvd runs {path} {key[:8]}")
    say(f"Next: ttvd report {path}")


def _show_study(store: "Store", name: str, console: "Console") -> None:
    """Error and calibration error of each line of a recipe."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from ttvd.bench.study import study

    found = study(store, name)
    columns = found.columns
    single = [[column] for column in columns] if 1 < len(columns) <= _MOST_COLUMNS else []
    heads = [column.label for group in single for column in group] + ["error %", "ECE %"]
    table = Table(title=Text(found.recipe.title), box=box.SIMPLE_HEAD, pad_edge=False)
    chosen = any(line.tried > 1 or line.rule == "oracle" for line in found.lines)
    table.add_column("method", no_wrap=True)
    if chosen:
        table.add_column("chosen by", no_wrap=True)
    for head in heads:
        table.add_column(Text(head), justify="right")
    for line in found.lines:
        numbers = [line.mean("error", group) for group in single]
        numbers += [line.mean("error", columns), line.mean("ece", columns)]
        cells = ["-" if number is None else f"{100 * number:.1f}" for number in numbers]
        rule = [line.rule if line.tried > 1 or line.rule == "oracle" else ""] if chosen else []
        table.add_row(Text(line.label), *rule, *cells)
    console.print(table)


def _show_plans(plans: "list[Plan]", path: Path, console: "Console") -> None:
    """What would be done, without doing or writing anything."""
    from collections import Counter

    from rich import box
    from rich.table import Table
    from rich.text import Text

    from ttvd.bench.store import Store

    done: set[str] = set()
    if path.exists():
        with Store(path, readonly=True) as store:
            done = store.done()
    for recipe, members in plans:
        table = Table(title=Text(recipe.title), box=box.SIMPLE_HEAD, pad_edge=False)
        for head in ("method", "model", "runs", "done"):
            table.add_column(head, justify="right" if head in ("runs", "done") else "left")
        lines = Counter((member.label, member.spec.checkpoint) for member in members)
        there = Counter(
            (member.label, member.spec.checkpoint) for member in members if member.spec.key in done
        )
        for line, count in lines.items():
            table.add_row(*map(Text, line), str(count), str(there[line]))
        console.print(table)
    keys = {member.spec.key for _, members in plans for member in members}
    console.print(f"{len(keys - done)} of {len(keys)} runs to do; nothing was written.", highlight=False)
