"""``ttvd demo``: the whole job on real digits, from source models to a page."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from ttvd.report.document import Table


def demo(
    out: Path = typer.Option(Path("out/demo"), help="Folder for the page, the tables and the runs."),
    train: bool = typer.Option(False, help="Train the source models again (minutes), into OUT/checkpoints."),
    quick: bool = typer.Option(False, help="Use a quarter of the stream."),
    every_method: bool = typer.Option(
        False, help="Instead: all registered methods with their papers' defaults, on noisy digits."
    ),
    seed: int = typer.Option(0, min=0, help="Seed of the order of the stream and of the methods."),
) -> None:
    """Adapt digit classifiers to corrupted digits; print a table and write a page."""
    from rich.console import Console

    from ttvd.cli.arguments import require
    from ttvd.cli.bench_progress import ProgressBars as LiveProgress
    from ttvd.cli.bench_progress import ProgressLines as LineProgress
    from ttvd.data.digits import split_digits
    from ttvd.demo import compare_rivals, demo_table, read_demo_recipe, run_demo
    from ttvd.files import open_atomic
    from ttvd.report.export import to_csv

    console = Console()
    for module in ("matplotlib", "jinja2", "PIL"):
        require(module, "demo")
    split_digits()  # a missing data set must show before anything is trained
    checkpoints = out / "checkpoints" if train else None
    if checkpoints is not None:
        _train(checkpoints, console)
    recipe = read_demo_recipe("every-method" if every_method else "demo", quick=quick, seed=seed)
    with LiveProgress(console) if console.is_terminal else LineProgress(console) as watch:
        made = run_demo(recipe, out, checkpoints=checkpoints, watch=watch)
    table = demo_table(made.results)
    with open_atomic(out / "table.csv", sync=False) as file:
        file.write(to_csv(table).encode())
    _print_table(table, recipe.title, console)
    for sentence in compare_rivals(made.results):
        console.print(sentence, highlight=False)
    console.print(f"\nThe page to open: [bold]{made.page.resolve()}[/bold]", soft_wrap=True, highlight=False)


def _train(folder: Path, console: "Console") -> None:
    from rich.progress import Progress

    from ttvd.demo.sources import MODELS, train_source
    from ttvd.source import Epoch

    with Progress(console=console) as bars:
        for model in MODELS:
            bar = bars.add_task(f"Training {model.name}", total=model.epochs)

            def advance(epoch: Epoch, bar: "TaskID" = bar) -> None:
                bars.update(bar, completed=epoch.number + 1)

            train_source(model, folder, progress=advance)


def _print_table(table: "Table", title: str, console: "Console") -> None:
    """Print a table without the rule of selection, which is the same in all rows, and without memory."""
    from rich import box
    from rich.table import Table as Shown
    from rich.text import Text

    shown = Shown(title=Text(f"{title}; the best of a column is bold"), box=box.SIMPLE_HEAD, pad_edge=False)
    headings = table.full_headings()
    columns = [
        number for number, heading in enumerate(headings) if heading.text not in ("chosen by", "peak MB")
    ]
    for number in columns:
        name = Text(headings[number].text.replace(" ", "\n"))
        shown.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in table.rows:
        shown.add_row(*(Text(row[n].text, style="bold" if row[n].best else "") for n in columns))
    console.print(shown)
