"""``ttvd bench``: run recipes on this machine or on a cluster and keep the results in a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ttvd.bench.engines import Engine
    from ttvd.bench.grid import Outcome, Plan
    from ttvd.bench.recipe import Recipe
    from ttvd.bench.spec import Spec, WorkerConfig
    from ttvd.bench.store import Store

_MAX_COLUMNS = 6  # more domains than this are averaged in the table of a recipe; the report shows each


def bench(
    recipes: list[Path] = typer.Argument(help="Recipes, TOML files."),
    store: Path = typer.Option(Path("out/bench.db"), help="File for the runs; created if it does not exist."),
    data: Path | None = typer.Option(None, help="Folder of data sets, as in `ttvd data get --root`."),
    checkpoints: Path | None = typer.Option(
        None, help="Folder of source models; default: those of the package."
    ),
    device: str = typer.Option("cpu", help="cpu, cuda (all GPUs in turn) or cuda:N."),
    engine: Literal["local", "ray"] = typer.Option(
        "local", help="What executes the runs: processes on this machine, or Ray."
    ),
    jobs: int | None = typer.Option(
        None, min=1, help="Number of runs at the same time; default: one for each core or GPU."
    ),
    threads: int = typer.Option(1, min=1, max=1024, help="Number of threads of a run on a CPU."),
    compiled: bool = typer.Option(
        False,
        "--compile",
        help="Compile the steps with torch.compile, once for each setting and batch size; for long streams on a GPU.",
    ),
    address: str | None = typer.Option(
        None, help="With ray: address of a cluster, auto or HOST:6379; default: start one here."
    ),
    gpus: float = typer.Option(1.0, help="With ray and cuda: share of a GPU for each run, for example 0.25."),
    limit: int | None = typer.Option(
        None, min=1, help="Use only this number of images of each set, for a trial."
    ),
    seeds: str | None = typer.Option(
        None, help="Use these seeds in place of the recipe's, for example 0,1,2."
    ),
    only: list[str] | None = typer.Option(None, help="Only the line with this label; can be repeated."),
    param: list[str] | None = typer.Option(
        None,
        help="NAME=VALUE: a parameter for all methods that have it, in place of the recipe's; can be repeated.",
    ),
    allow_code: bool = typer.Option(
        False,
        "--allow-code",
        help="Import and run what the recipes name as package.module:Name, also from the current folder.",
    ),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Check everything, print what would be done, and stop."
    ),
) -> None:
    """Execute all runs of recipes that are not in the store yet.

    If it is interrupted or killed, the same command continues where it stopped. A recipe that names methods or models
    as package.module:Name is refused without --allow-code, since these are code.
    """
    from ttvd.interrupts import delay_interrupts, raise_interrupts

    try:
        with raise_interrupts():
            with delay_interrupts():
                from dataclasses import replace

                from ttvd.bench.grid import make_plans
                from ttvd.cli.arguments import add_current_folder, make_console

            console = make_console()
            if not 0 < gpus < float("inf"):
                raise ValueError(f"--gpus must be a share of a GPU above 0, for example 0.25; got {gpus:g}")
            if address is not None and engine != "ray":
                raise ValueError("--address needs --engine ray")
            if allow_code:
                add_current_folder()
            found = read_recipes(recipes, limit, seeds, only, param, allow_code=allow_code)
            config = replace(
                _make_config(data, checkpoints, device, threads, engine, compiled), allow_code=allow_code
            )
            if dry_run:
                _print_plans(make_plans(found, config)[0], store, console)
                return
            failed = _run(found, store, _make_engine(engine, jobs, config, address, gpus), config, console)
    except KeyboardInterrupt:
        typer.echo(f"Interrupted. All finished runs are in {store}; the same command continues from there.")
        raise typer.Exit(130) from None
    if failed:
        raise typer.Exit(1)


def read_recipes(
    paths: list[Path],
    limit: int | None = None,
    seeds: str | None = None,
    only: list[str] | None = None,
    param: list[str] | None = None,
    *,
    allow_code: bool = False,
) -> list[Recipe]:
    """Read recipes and apply the options of the command line to them.

    Args:
        paths: TOML files with different names.
        limit: Number of images of each set.
        seeds: Seeds in place of those of the recipes, separated by commas.
        only: Labels of the lines to keep.
        param: ``NAME=VALUE`` pairs, parameters in place of those of the recipes.
        allow_code: Whether the recipes may name code, which is imported and run.
    """
    from ttvd.bench.recipe import check_code, cut_limit, cut_lines, cut_seeds, read_recipe, set_params
    from ttvd.cli.arguments import parse_value, split_pairs

    recipes = [read_recipe(path) for path in paths]
    for recipe in recipes:
        check_code(recipe, allow_code=allow_code)
    names = [recipe.name for recipe in recipes]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two recipes are called {twice[0]}; the store needs different file names")
    if limit is not None:
        recipes = [cut_limit(recipe, limit) for recipe in recipes]
    if seeds is not None:
        numbers = _parse_seeds(seeds)
        recipes = [cut_seeds(recipe, numbers) for recipe in recipes]
    if only:
        recipes = [cut_lines(recipe, only, allow_code=allow_code) for recipe in recipes]
    params = {name: parse_value(text) for name, text in split_pairs(param or ()).items()}
    return [set_params(recipe, params) for recipe in recipes] if params else recipes


def _parse_seeds(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts) or len({int(part) for part in parts}) < len(parts):
        raise ValueError(f"--seeds takes different whole numbers from 0 on, for example 0,1,2; got {text!r}")
    return tuple(map(int, parts))


def _make_config(
    data: Path | None, checkpoints: Path | None, device: str, threads: int, engine: str, compiled: bool
) -> WorkerConfig:
    from ttvd.bench.spec import WorkerConfig
    from ttvd.cli.arguments import check_device, require

    for name, folder in (("--data", data), ("--checkpoints", checkpoints)):
        if folder is not None and not folder.is_dir():
            raise NotADirectoryError(f"{name}: there is no folder {folder}")
    if engine == "ray":
        require("ray", "ray")  # the GPUs are those of its nodes, not necessarily of this machine
    else:
        check_device(device)
    # Absolute, because workers of a cluster have another working directory.
    folders = data and data.resolve(), checkpoints and checkpoints.resolve()
    return WorkerConfig(*folders, device, threads, compiled)


def _make_engine(
    engine: str, jobs: int | None, config: WorkerConfig, address: str | None, gpus: float
) -> Engine:
    import os

    import torch

    from ttvd.bench.engines.local import LocalEngine
    from ttvd.bench.engines.ray import RayEngine

    if engine == "ray":
        return RayEngine(address, jobs, gpus)
    devices = [config.device]
    if config.device == "cuda":
        devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(1, cores // config.threads) if config.device == "cpu" else len(devices)
    return LocalEngine(jobs or most, devices)


def _run(recipes: list[Recipe], path: Path, engine: Engine, config: WorkerConfig, console: Console) -> bool:
    """Execute the runs and print the results; return whether some have failed."""
    from contextlib import closing

    from ttvd.bench.grid import make_plans, run_plans
    from ttvd.bench.store import Store
    from ttvd.cli.bench_progress import ProgressBars, ProgressLines

    with closing(engine):
        engine.start()  # workers import their libraries while the plan is made
        plans, shared = make_plans(recipes, config)
        _make_folder(path)
        with Store(path) as store:
            with ProgressBars(console) if console.is_terminal else ProgressLines(console) as progress:
                outcome = run_plans(plans, store, engine, config, shared=shared, watch=progress)
            lost = [text for recipe in recipes for text in _make_figures(recipe, store, config, console)]
            for recipe in recipes:
                _print_study(store, recipe.name, console)
    specs = {member.spec.key: member.spec for _, members in plans for member in members}
    for text in (*_describe_outcome(outcome, specs, path), *lost):
        console.print(text, soft_wrap=True, highlight=False, markup=False)
    return bool(outcome.failed or lost)


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--store {path}: its folder cannot be created ({error}); use a folder that can be written to"
        ) from error


def _make_figures(recipe: Recipe, store: Store, config: WorkerConfig, console: Console) -> list[str]:
    """Make the figures of a recipe that are not in the store yet; return the errors with their tracebacks."""
    from dataclasses import replace

    import torch
    from rich.text import Text

    from ttvd.bench.figures import make_figures
    from ttvd.bench.resources import Resources

    if not recipe.figures:
        return []
    if not torch.cuda.is_available():  # the GPUs are those of the nodes of a cluster
        config = replace(config, device="cpu")
    with console.status("Making figures") as status:
        made = make_figures(
            recipe,
            Resources(config),
            store,
            lambda name: status.update(Text(f"Making figure {name} of {recipe.name}")),
        )
    return [
        f"  failed: figure {name} of {recipe.name}: {text.strip().splitlines()[-1]}\n{text}"
        for name, text in made.failed.items()
    ]


def _describe_outcome(outcome: Outcome, specs: dict[str, Spec], path: Path) -> list[str]:
    """Return the closing lines: how many runs were executed, which have failed, and what to do next."""
    from ttvd.cli.bench_progress import count_runs, describe

    words = [f"{count_runs(outcome.done)} done"]
    words += [f"{outcome.elsewhere} done by another process"] if outcome.elsewhere else []
    words += [f"{outcome.skipped} were there before"] if outcome.skipped else []
    words += [f"{len(outcome.failed)} failed"] if outcome.failed else []
    lines = [f"{', '.join(words)}. The store: {path}"]
    for key, text in outcome.failed.items():
        lines.append(f"  failed: {describe(specs[key])}: {text.strip().splitlines()[-1]}")
        lines.append(f"          ttvd runs {path} {key[:8]}")
    return [*lines, f"Next: ttvd report {path}"]


def _print_study(store: Store, name: str, console: Console) -> None:
    """Print error and calibration error of each line of a recipe."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from ttvd.bench.study import study

    found = study(store, name)
    columns = found.columns
    single = [[column] for column in columns] if 1 < len(columns) <= _MAX_COLUMNS else []
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


def _print_plans(plans: list[Plan], path: Path, console: Console) -> None:
    """Print what would be done; nothing is executed or written."""
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
