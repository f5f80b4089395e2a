import re
import subprocess
import sys

import pytest
import typer.testing

from ttvd.cli.main import app
from ttvd.methods import list_methods

RUNNER = typer.testing.CliRunner()


def run_ttvd(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, with its exit code."""
    code = "import sys; from ttvd.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


def test_methods_lists_the_registry() -> None:
    result = RUNNER.invoke(app, ["methods"], env={"COLUMNS": "160"})
    assert result.exit_code == 0
    assert all(f" {name} " in result.output for name in list_methods())


def test_parameters_of_one_method() -> None:
    result = RUNNER.invoke(app, ["methods", "ttvd-paper"])
    assert result.exit_code == 0
    assert "gamma" in result.output
    assert "-0.8" in result.output


@pytest.mark.parametrize("name", list(list_methods()))
def test_every_parameter_is_explained(name: str) -> None:
    result = RUNNER.invoke(app, ["methods", name], env={"COLUMNS": "4000"})
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.output.splitlines() if line.startswith(" ")}
    for parameter in list_methods()[name].parameters():
        assert re.search(rf"^ {parameter} +\S.*  \S+ \S+", lines[parameter])
        assert "`" not in lines[parameter]


def test_version() -> None:
    result = RUNNER.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("ttvd 0.")


def test_errors_come_without_traceback_and_with_code_2() -> None:
    done = run_ttvd("methods", "tnet")
    assert done.returncode == 2
    assert done.stderr == "ttvd: error: no method is called 'tnet'; did you mean tent?\n"


@pytest.mark.parametrize("arguments", [["nonsense"], ["demo", "--seed", "-1"], ["demo", "--nonsense"]])
def test_bad_usage_has_code_2(arguments: list[str]) -> None:
    assert RUNNER.invoke(app, arguments).exit_code == 2
