"""The entry point ``ttvd``: its commands, and how errors reach the user."""

import os
import sys
from typing import NoReturn

import typer

from ttvd.cli.adapt import adapt
from ttvd.cli.bench import bench
from ttvd.cli.data import corrupt_set, data_app, draw_contact_sheet
from ttvd.cli.demo import demo
from ttvd.cli.methods import show_methods
from ttvd.cli.report import report
from ttvd.cli.runs import show_runs
from ttvd.interrupts import raise_interrupts

EXIT_CODES = (
    "Exit codes: 0 done; 1 the command ran, but some or all of its work failed (no image was readable, a run failed); "
    "2 the input or an option cannot be used, the message says why; 3 `ttvd adapt` ended, but its guard went back to "
    "the source on the way; 130 interrupted. Set TTVD_DEBUG=1 to see the traceback of an error."
)

app = typer.Typer(
    name="ttvd",
    help="Test-time adaptation of classifiers, guided by Voronoi geometry.",
    epilog=EXIT_CODES,
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
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"ttvd {installed('ttvd')}")
        raise typer.Exit


def main() -> None:
    """Run the command line. Errors that the user can correct are printed without a traceback.

    SIGTERM ends a command as Ctrl-C does, also while it loads its libraries.
    """
    try:
        with raise_interrupts():
            app()
    except (ValueError, TypeError, OSError, ImportError) as error:
        if os.environ.get("TTVD_DEBUG"):
            raise
        typer.echo(f"ttvd: error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("ttvd: interrupted", err=True)
        _exit_interrupted()
    except SystemExit as end:
        if end.code == 130:
            _exit_interrupted()
        raise


def _exit_interrupted() -> NoReturn:
    # Python would end by SIGINT, without an exit code, if the interrupt had passed through a text that was being
    # executed, such as that of a dataclass. It forgets that when it executes another one.
    exec("")  # noqa: S102
    sys.exit(130)
