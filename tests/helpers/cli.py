"""The command line, run in the process of the test."""

import typer.testing

from ttvd.cli.main import app

RUNNER = typer.testing.CliRunner()


def run_cli(*arguments: object, columns: int = 200) -> typer.testing.Result:
    """Run a command and return its output, exit code and exception."""
    return RUNNER.invoke(app, [*map(str, arguments)], env={"COLUMNS": str(columns)})


def check_cli(*arguments: object, code: int = 0) -> str:
    """Run a command that must end with this exit code, and return its output."""
    result = run_cli(*arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def refuse_cli(*arguments: object) -> str:
    """Run a command that must refuse its input, and return the message."""
    result = run_cli(*arguments)
    if isinstance(result.exception, ValueError | OSError):
        return str(result.exception)
    assert result.exit_code == 2, result.output  # refused by the parser of arguments
    return result.output
