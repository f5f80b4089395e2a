"""``ttvd runs``: list the runs of a store, show one, export them, or pack them for version control."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ttvd.bench.export import ListedRun
    from ttvd.bench.spec import Spec
    from ttvd.bench.store import Reader

COLORS = {"done": "", "failed": "red", "running": "cyan", "missing": "dim"}


def show_runs(
    store: Path = typer.Argument(help="Store that `ttvd bench` has written, or packed runs, a .csv file."),
    key: str | None = typer.Argument(None, help="Show this run; the first digits of its key are enough."),
    method: str | None = typer.Option(None, help="Only runs of this method."),
    domain: str | None = typer.Option(
        None, help='Only runs on this domain, for example "fog 5", fog or clean.'
    ),
    recipe: str | None = typer.Option(None, help="Only runs that this recipe asks for."),
    seed: int | None = typer.Option(None, help="Only runs with this seed."),
    status: str | None = typer.Option(None, help="Only runs that are done, failed, running or missing."),
    export: Path | None = typer.Option(
        None, help="Write the runs to this .csv or .parquet file, one on each line, instead of listing them."
    ),
    batches: bool = typer.Option(False, "--batches", help="With --export: one line for each batch."),
    overwrite: bool = typer.Option(False, "--overwrite", help="With --export: replace a file that exists."),
    pack: Path | None = typer.Option(
        None,
        help="Write RECIPE.csv and RECIPE.toml for each recipe (or that of --recipe) to this folder, to be committed.",
    ),
    replace: bool = typer.Option(
        False, "--replace", help="With --pack: drop packed runs that this store does not ask for."
    ),
    unpack: Path | None = typer.Option(
        None, help="Add the runs of such a .csv file to the store, which is created if it does not exist."
    ),
    json_: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the runs of a store, show one, export them, or pack them for version control."""
    from ttvd.bench.export import list_runs, select_runs
    from ttvd.bench.packed import open_runs
    from ttvd.cli.arguments import make_console

    for name, given, option, target in (
        ("--batches", batches, "--export FILE", export),
        ("--overwrite", overwrite, "--export FILE", export),
        ("--replace", replace, "--pack FOLDER", pack),
    ):
        if given and target is None:
            raise ValueError(f"{name} needs {option}")
    if export is not None:
        _check_export(export, store, batches, overwrite)
    console = make_console()
    filters = (key, method, domain, seed, status, export)
    if pack is not None:
        _check_alone(*filters, unpack)
        _pack(store, pack, recipe, replace, console)
        return
    if unpack is not None:
        _check_alone(*filters, recipe)
        _unpack(store, unpack, console)
        return
    with open_runs(store) as opened:
        found = None if key is None else opened.find(key)
        entries = select_runs(
            list_runs(opened),
            key=found, method=method, domain=domain, recipe=recipe, seed=seed, status=status,
        )  # fmt: skip
        if export is not None:
            _export(opened, entries, export, batches, console)
        elif json_:
            _print_json([entry.document() for entry in entries], single=found is not None)
        elif found is not None and entries:
            _print_run(entries[0], console)
        else:
            _print_list(entries, console, len(opened.done()))


def _check_alone(*options: object) -> None:
    if any(value is not None for value in options):
        raise ValueError(
            "--pack takes whole recipes (one of them with --recipe), --unpack a whole file; give no other options"
        )


def _check_export(path: Path, store: Path, batches: bool, overwrite: bool) -> None:
    """Refuse an export that cannot be written, before the store is read."""
    from ttvd.bench.export import check_target
    from ttvd.cli.arguments import require
    from ttvd.deploy.predictions import check_output

    if batches and store.suffix == ".csv":
        raise ValueError("packed runs have no batches; --batches needs the store that they were packed from")
    check_target(path)
    if path.suffix == ".parquet":
        require("pyarrow", "parquet")
    if path.resolve() == store.resolve():
        raise ValueError(f"{path} is the store itself; export to another file")
    check_output(path, overwrite=overwrite)


def _print_json(documents: list[dict[str, Any]], single: bool) -> None:
    import json

    typer.echo(json.dumps(documents[0] if single and documents else documents, indent=2))


def _print_list(entries: list[ListedRun], console: Console, done: int) -> None:
    from collections import Counter

    from rich.table import Table
    from rich.text import Text

    if not entries:
        text = f"no runs match; {done} runs of the store are done, leave the options out to list them"
        console.print(text if done else "no runs", highlight=False, soft_wrap=True)
        return
    settings = describe_differences([entry.spec for entry in entries])
    table = Table("key", "label", "method", "domain", *(["setting"] if any(settings) else []), box=None)
    for heading in ("seed", "error %", "ECE %", "seconds"):
        table.add_column(heading, justify="right")
    table.add_column("status")
    table.columns[0].no_wrap = True
    for entry, setting in zip(entries, settings, strict=True):
        # Names in a store must not be read as markup, so every cell is a Text.
        words = (
            entry.key,
            entry.label or "-",
            entry.spec.method,
            entry.spec.domain_label,
            *([setting] if any(settings) else []),
            str(entry.spec.seed),
        )
        row = [*words, *_score(entry), entry.status]
        table.add_row(*map(Text, row), style=COLORS[entry.status])
    console.print(table)
    counts = Counter[str](entry.status for entry in entries)
    console.print(", ".join(f"{counts[name]} {name}" for name in COLORS if counts[name]), highlight=False)


def describe_differences(specs: Sequence[Spec]) -> list[str]:
    """Describe how each run differs from others of the same method, model, domain and seed.

    Example:
        >>> from ttvd.bench.spec import Domain, Spec
        >>> specs = [Spec("m", "", "digits", "", (Domain("fog"),), "bn", batch_size=size) for size in (8, 64)]
        >>> describe_differences(specs)
        ['batch size 8', 'batch size 64']
    """
    flat = [_flatten(spec) for spec in specs]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, spec in enumerate(specs):
        group = (spec.method, spec.checkpoint, spec.views, spec.data, spec.domain_label, spec.seed)
        groups.setdefault(group, []).append(number)
    words = [""] * len(specs)
    for members in groups.values():
        names = dict.fromkeys(name for number in members for name in flat[number])
        differing = [name for name in names if len({repr(flat[number].get(name)) for number in members}) > 1]
        for number in members:
            pairs = [(name.replace("_", " "), flat[number].get(name)) for name in differing]
            words[number] = ", ".join(f"{name} {value}" for name, value in pairs if value is not None)
    return words


def _flatten(spec: Spec) -> dict[str, Any]:
    """Return what may differ between runs of a line, each parameter and option by its name."""
    document = spec.document()
    flat = {**document.pop("parameters"), **document.pop("options")}
    names = (
        "batch_size", "stream", "join", "limit", "sites", "selection", "episodic", "constants", "precision"
    )  # fmt: skip
    flat |= {name: document[name] for name in names}
    return flat | {"weights": spec.weights, "revision": spec.revision}


def _score(entry: ListedRun) -> tuple[str, str, str]:
    """Return error, calibration error and seconds as the list shows them."""
    if entry.summary is None:
        return "-", "-", "-"
    metrics = entry.summary.metrics
    return (
        f"{100 * metrics['error']:.2f}",
        f"{100 * metrics['ece']:.2f}",
        f"{entry.summary.facts.seconds:.1f}",
    )


def _print_run(entry: ListedRun, console: Console) -> None:
    from datetime import datetime

    document = entry.document()
    lines = [f"{asked['recipe']}: {asked['label']}" for asked in document["asked"]]
    console.print(f"run {entry.key}: {entry.status}", *lines, sep="\n", markup=False, highlight=False)
    totals = {name: document[name] for name in ("batches", "kept") if name in document}
    for title, values in (
        ("spec", document["spec"]),
        ("metrics", document.get("metrics", {}) | totals),
        ("facts", document.get("facts", {})),
    ):
        if values:
            console.print(f"\n[bold]{title}[/bold]")
            console.print(_tabulate(values))
    if entry.failure is not None:
        moment = entry.failure.when
        when = datetime.fromtimestamp(moment).astimezone().isoformat(" ", "seconds") if moment else ""
        console.print(f"\n[bold red]failed[/bold red] {when}".rstrip(), highlight=False)
        console.print(entry.failure.text, markup=False, highlight=False, soft_wrap=True)


def _tabulate(values: dict[str, Any]) -> Table:
    import json

    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False)
    for name, value in values.items():
        table.add_row(name, Text(value if isinstance(value, str) else json.dumps(value)))
    return table


def _pack(store: Path, folder: Path, recipe: str | None, replace: bool, console: Console) -> None:
    """Write the runs of a store to files that can be committed."""
    from ttvd.bench.packed import PackedRuns, open_runs, pack_runs

    with open_runs(store) as opened:
        for name in [recipe] if recipe is not None else opened.recipes():
            path, count = pack_runs(opened, name, folder, replace=replace)
            asked = {member.spec.key for member in PackedRuns(path).members(name)}
            text = f"{count} of {len(asked)} runs in {path}"
            console.print(text, soft_wrap=True, highlight=False, markup=False)


def _unpack(store: Path, path: Path, console: Console) -> None:
    """Add the runs of such a file to a store."""
    from ttvd.bench.packed import PackedRuns, unpack_runs
    from ttvd.bench.store import Store

    if path.suffix != ".csv":
        raise ValueError(f"--unpack takes a .csv file that --pack has written, got {path.name}")
    if store.suffix == ".csv":
        raise ValueError(f"--unpack adds runs to a store, but {store.name} is a file of packed runs")
    source = PackedRuns(path)
    with Store(store) as target:
        text = f"{unpack_runs(source, target)} of {len(source.done())} runs were new to {store}"
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _export(store: Reader, entries: list[ListedRun], path: Path, batches: bool, console: Console) -> None:
    from ttvd.bench.export import export_batches, export_runs

    count = export_batches(store, entries, path) if batches else export_runs(entries, path)
    what = "batches" if batches else "runs"
    console.print(f"{count} {what} in {path}", soft_wrap=True, highlight=False, markup=False)
