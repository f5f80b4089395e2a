"""``ttvd methods``: what there is to choose from."""

import typer


def show_methods(
    name: str | None = typer.Argument(None, help="Show the parameters of this method."),
) -> None:
    """List the methods, or the parameters of one."""
    from rich.console import Console
    from rich.table import Table

    from ttvd.adapters import find_method, methods

    console = Console()
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
        needs = ", ".join(sorted(method.needs)) or "-"
        passes = f"{method.forwards} + {method.backwards}"
        table.add_row(method.name, method.paper, needs, method.updates, passes)
    console.print(table)
    console.print("passes: forward + backward for each image. `ttvd methods NAME` says more.", style="dim")
