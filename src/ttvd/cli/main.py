"""The entry point: commands, and how their errors reach the user.

Exit codes: 0 done, 1 a check failed, 2 the input cannot be used (the message says what to do), 130 interrupted.
"""

import os
import sys

import typer

from ttvd.cli.adapt import adapt
from ttvd.cli.bench import bench
from ttvd.cli.data import corrupt_set, data_app, draw_contact_sheet
from ttvd.cli.demo import demo
from ttvd.cli.methods import show_methods
from ttvd.cli.report import report
from ttvd.cli.runs import show_runs

app = typer.Typer(
    name="ttvd",
    help="Test-time adaptation of classifiers, guided by Voronoi geometry.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo)
app.command("adapt")(adapt)
app.command("corrupt")(corrupt_set)
app.command("contact-sheet")(draw_contact_sheet)
app.add_typer(data_app, name="data")
app.command("bench")(bench)
app.command("methods")(show_methods)
app.command("runs")(show_runs)
app.command("report")(report)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"ttvd {installed('ttvd')}")
        raise typer.Exit


def main() -> None:
    """Run the command line; errors that the user can mend come without a traceback (TTVD_DEBUG=1 shows it)."""
    try:
        app()
    except (ValueError, TypeError, OSError, ImportError) as error:
        if os.environ.get("TTVD_DEBUG"):
            raise
        typer.echo(f"ttvd: error: {error}", err=True)
        sys.exit(2)
