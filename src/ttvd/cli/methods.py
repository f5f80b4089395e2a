"""``ttvd methods``: what there is to choose from."""

import inspect
import re
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ttvd.methods import Method


def show_methods(
    name: str | None = typer.Argument(None, help="Show the parameters of this method."),
    markdown: bool = typer.Option(False, help="Print the table for a document."),
) -> None:
    """List the methods, or the parameters of one."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ttvd.methods import find_method, list_methods

    console = Console()
    if markdown:
        typer.echo("| method | what it does | paper | needs | updates | passes |\n|---|---|---|---|---|---|")
        for method in list_methods().values():
            typer.echo(f"| {' | '.join((method.name, method.summary, *_describe(method)))} |")
        return
    if name is not None:
        method = find_method(name)
        console.print(f"[bold]{method.name}[/bold]  {method.summary}\n{method.paper}", highlight=False)
        table = Table("parameter", "default", "meaning", box=None)
        told = explain_parameters(method.adapter)
        for key, value in method.parameters().items():
            table.add_row(key, "see there" if value is None else Text(repr(value)), Text(told.get(key, "")))
        console.print(table)
        return
    table = Table("method", "paper", "needs", "updates", "passes", box=None)
    table.columns[0].no_wrap = True
    for method in list_methods().values():
        table.add_row(method.name, *_describe(method))
    console.print(table)
    console.print("passes: forward + backward for each image. `ttvd methods NAME` says more.", style="dim")


def explain_parameters(adapter: type) -> dict[str, str]:
    """What the documentation of a class and of its ancestors says of each argument, as plain text."""
    told: dict[str, str] = {}
    for kind in adapter.__mro__:
        _, _, arguments = inspect.cleandoc(kind.__doc__ or "").partition("\nArgs:\n")
        entries = r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)"
        for names, text in re.findall(entries, arguments.partition("\n\n")[0], re.MULTILINE):
            told = dict.fromkeys(names.split(", "), _to_plain(text)) | told
    return told


def _to_plain(text: str) -> str:
    names = re.sub(r":\w+:`~?([^`]+)`", lambda found: found[1].rpartition(".")[2], text)
    return re.sub(r"\s+", " ", names.replace("``", ""))


def _describe(method: "Method") -> tuple[str, str, str, str]:
    """Paper, needs, updates and cost, as tables show them."""
    needs = ", ".join(sorted(method.needs)) or "-"
    return method.paper, needs, method.updates, f"{method.forwards} + {method.backwards}"
