"""``ttvd demo``: the main job on real digits, from source model to a page."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table

    from ttvd.demo.job import Results


def demo(
    out: Path = typer.Option(Path("out/demo"), help="Folder to write the page and the table to."),
    train: bool = typer.Option(False, help="Train the source models again (minutes), into OUT/checkpoints."),
    quick: bool = typer.Option(False, help="A quarter of the stream and coarser figures."),
    every_method: bool = typer.Option(
        False,
        help="Instead: one table of all registered methods with their papers' defaults, on noisy digits.",
    ),
    seed: int = typer.Option(0, min=0, help="Seed of the corruptions and of the order of the stream."),
) -> None:
    """Adapt digit classifiers to corrupted digits; print a table and write a page."""
    from rich.console import Console

    from ttvd.cli.extras import require
    from ttvd.data.digits import split_digits
    from ttvd.demo.page import compare_rivals, write_page

    console = Console()
    for module in ("matplotlib", "jinja2", "PIL"):
        require(module, "demo")
    split_digits()  # a missing data set must show before anything is trained
    out.mkdir(parents=True, exist_ok=True)
    folder = out / "checkpoints" if train else None
    if folder is not None:
        _train(folder, every_method, console)
    if every_method:
        _compare_all(out, folder, 256 if quick else 1000, seed, console)
        return
    results = _measure(folder, 500 if quick else None, seed, console)
    console.print(_tabulate(results, out / "table.csv"))
    for line in compare_rivals(results):
        console.print(line, highlight=False)
    with console.status("Drawing the figures"):
        page = write_page(results, out / "index.html", folder=folder, quick=quick)
    console.print(f"\nThe page to open: [bold]{page.resolve()}[/bold]", soft_wrap=True)


def _train(folder: Path, special: bool, console: "Console") -> None:
    from rich.progress import Progress

    from ttvd.demo.sources import PLANS, SPECIAL_PLANS, train_source
    from ttvd.source import Epoch

    with Progress(console=console) as bars:
        for plan in (*PLANS, *SPECIAL_PLANS) if special else PLANS:
            bar = bars.add_task(f"Training {plan.name}", total=plan.epochs)

            def advance(epoch: Epoch, bar: "TaskID" = bar) -> None:
                bars.update(bar, completed=epoch.number + 1)

            train_source(plan, folder, progress=advance)


def _measure(folder: Path | None, limit: int | None, seed: int, console: "Console") -> "Results":
    from rich.progress import Progress

    from ttvd.bench import Row
    from ttvd.demo.job import BATCH, DOMAINS, ENTRIES, Domain, Entry, measure

    count = -(-(limit or 2000) // BATCH)
    with Progress(console=console, transient=True) as bars:
        bar = bars.add_task("Adapting", total=count * len(DOMAINS) * len(ENTRIES))

        def advance(entry: Entry, domain: Domain, row: Row) -> None:
            bars.update(bar, advance=1, description=f"{domain.label}: {entry.label}")

        return measure(ENTRIES, DOMAINS, folder=folder, limit=limit, seed=seed, progress=advance)


def _tabulate(results: "Results", file: Path) -> "Table":
    """The table of the page, for the terminal and as a .csv file."""
    import csv

    from rich import box
    from rich.table import Table

    from ttvd.demo.page import make_table

    made = make_table(results)
    headings = [heading if isinstance(heading, str) else heading.text for heading in made.headings]
    shown = Table(title="Corrupted digits; the best of a column is bold", box=box.SIMPLE_HEAD, pad_edge=False)
    columns = [number for number, heading in enumerate(headings) if heading != "model"]
    for number in columns:
        heading = headings[number].replace(" ", "\n")
        shown.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in made.rows:
        cells = [row[number] for number in columns]
        shown.add_row(*[f"[bold]{cell.text}[/bold]" if cell.best else cell.text for cell in cells])
    with file.open("w", newline="", encoding="utf-8") as out:
        csv.writer(out).writerows([headings, *[[cell.text for cell in row] for row in made.rows]])
    return shown


def _compare_all(out: Path, folder: Path | None, limit: int, seed: int, console: "Console") -> None:
    import csv

    from rich import box
    from rich.table import Table

    from ttvd.demo.everything import DOMAIN, measure_all
    from ttvd.methods import list_methods

    with console.status("Starting") as status:
        outcomes = measure_all(limit, seed, folder=folder, progress=status.update)
    headings = ("method", "model", "error %", "ECE %", "ms per batch", "peak MB", "kept %")
    rows = []
    for outcome in outcomes:
        total = outcome.record.metrics().compute()
        numbers = [100 * total["error"], 100 * total["ece"], 1e3 * outcome.record.seconds_per_batch()]
        memory = "-" if outcome.peak is None else f"{outcome.peak / 1e6:.0f}"
        learns = list_methods()[outcome.method].backwards > 0
        kept = f"{100 * outcome.record.kept():.0f}" if learns else "-"
        rows.append([outcome.method, outcome.checkpoint, *[f"{n:.1f}" for n in numbers], memory, kept])
    shown = Table(
        title=f"{limit} digits, {DOMAIN.label}, the papers' defaults", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for number, heading in enumerate(headings):
        if heading != "model":
            shown.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        shown.add_row(row[0], *row[2:])
    console.print(shown)
    with (out / "methods.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([headings, *rows])
    console.print(f"The table: [bold]{(out / 'methods.csv').resolve()}[/bold]", soft_wrap=True)
