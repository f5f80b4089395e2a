"""``ttvd methods``: the methods to choose from, and their parameters."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ttvd.methods import Method


def show_methods(
    name: str | None = typer.Argument(
        None, help="Show the parameters of this method; a name or package.module:Class."
    ),
    markdown: bool = typer.Option(False, "--markdown", help="Print the table as Markdown."),
) -> None:
    """List the methods, those of installed plug-ins included, or show the parameters of one."""
    from rich.console import Console
    from rich.table import Table

    from ttvd.cli.arguments import add_current_folder
    from ttvd.methods import find_method, list_methods

    if name is not None:
        add_current_folder()
        _show_parameters(find_method(name))
        return
    methods = list_methods().values()
    if markdown:
        typer.echo("| method | what it does | paper | needs | updates | passes |\n|---|---|---|---|---|---|")
        for method in methods:
            typer.echo(f"| {' | '.join((method.name, method.summary, *_describe(method)))} |")
        return
    console = Console(markup=False, emoji=False, highlight=False)
    table = Table("method", "paper", "needs", "updates", "passes", box=None)
    table.columns[0].no_wrap = True
    for method in methods:
        table.add_row(method.name, *_describe(method))
    console.print(table)
    console.print("passes: forward + backward passes for each image. More: `ttvd methods NAME`.", style="dim")


def _show_parameters(method: Method) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(markup=False, emoji=False, highlight=False)
    console.print(Text(method.name, "bold"), f" {method.summary}\n{method.paper}")
    table = Table("parameter", "default", "meaning", box=None)
    meanings = read_parameter_docs(method.adapter)
    for key, value in method.parameters().items():
        table.add_row(key, "see meaning" if value is None else Text(repr(value)), Text(meanings.get(key, "")))
    console.print(table)


def read_parameter_docs(adapter: type) -> dict[str, str]:
    """Return what the docstrings of a class and of its bases say about each argument, as plain text.

    Example:
        >>> import ttvd
        >>> "lr" in read_parameter_docs(ttvd.TTVD)
        True
    """
    found: dict[str, str] = {}
    for kind in adapter.__mro__:
        _, _, arguments = inspect.cleandoc(kind.__doc__ or "").partition("\nArgs:\n")
        entries = r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)"
        for names, text in re.findall(entries, arguments.partition("\n\n")[0], re.MULTILINE):
            found = dict.fromkeys(names.split(", "), _strip_markup(text)) | found
    return found


def _strip_markup(text: str) -> str:
    names = re.sub(r":\w+:`~?([^`]+)`", lambda match: match[1].rpartition(".")[2], text)
    return re.sub(r"\s+", " ", names.replace("``", ""))


def _describe(method: Method) -> tuple[str, str, str, str]:
    """Return paper, needs, updates and cost as the tables show them."""
    needs = ", ".join(sorted(method.needs)) or "-"
    return method.paper, needs, method.updates, f"{method.forwards} + {method.backwards}"
