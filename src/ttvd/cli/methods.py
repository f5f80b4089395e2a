"""``ttvd methods``: what there is to choose from."""

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ttvd.adapters import Method


def show_methods(
    name: str | None = typer.Argument(None, help="Show the parameters of this method."),
    markdown: bool = typer.Option(False, help="Print the table for a document."),
) -> None:
    """List the methods, or the parameters of one."""
    from rich.console import Console
    from rich.table import Table

    from ttvd.adapters import find_method, methods

    console = Console()
    if markdown:
        typer.echo("| method | what it does | paper | needs | updates | passes |\n|---|---|---|---|---|---|")
        for method in methods().values():
            typer.echo(f"| {' | '.join((method.name, method.summary, *_describe(method)))} |")
        return
    if name is not None:
        method = find_method(name)
        console.print(f"[bold]{method.name}[/bold]  {method.summary}\n{method.paper}", highlight=False)
        table = Table("parameter", "default", box=None)
        for key, value in method.parameters().items():
            table.add_row(key, repr(value))
        console.print(table)
        return
    table = Table("method", "paper", "needs", "updates", "passes", box=None)
    table.columns[0].no_wrap = True
    for method in methods().values():
        table.add_row(method.name, *_describe(method))
    console.print(table)
    console.print("passes: forward + backward for each image. `ttvd methods NAME` says more.", style="dim")


def _describe(method: "Method") -> tuple[str, str, str, str]:
    """Paper, needs, updates and cost, as tables show them."""
    needs = ", ".join(sorted(method.needs)) or "-"
    return method.paper, needs, method.updates, f"{method.forwards} + {method.backwards}"
