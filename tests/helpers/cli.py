"""The command line, run in the process of the test."""

import sys
from pathlib import Path

import pytest
import typer.testing

from ttvd.cli.main import app

RUNNER = typer.testing.CliRunner()
METHOD = '''
import ttvd


class Scaled(ttvd.Adapter):
    """Scales the logits.

    Args:
        model: The classifier.
        factor: Factor of the logits.
    """

    def __init__(self, model, *, factor: float = 1.0):
        super().__init__(model, statistics=ttvd.Statistics(prior=1.0))
        self.factor = factor

    def output(self, x):
        return self.factor * super().output(x)
'''


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


def enter_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder the current one; only the command line may add it to the search path."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])


def write_method(folder: Path) -> str:
    """Write a module that defines a method, and return the method as ``package.module:Class``."""
    module = f"module_of_{folder.name}"  # modules stay loaded, so each test needs a name of its own
    (folder / f"{module}.py").write_text(METHOD)
    return f"{module}:Scaled"
