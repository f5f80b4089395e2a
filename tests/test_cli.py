"""The command line as a whole: help, version, exit codes, and the list of methods."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cli import check_cli, enter_folder, run_cli, write_method
from ttvd.cli.arguments import parse_parameters
from ttvd.cli.main import main
from ttvd.methods import find_method, list_methods


def test_version() -> None:
    assert check_cli("--version").startswith("ttvd 0.")


def test_help_documents_the_exit_codes() -> None:
    output = " ".join(check_cli("--help").split())
    assert "Exit codes: 0 " in output
    assert all(f" {code} " in output for code in (1, 2, 130))


def test_errors_come_without_traceback_and_with_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ttvd", "methods", "tnet"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("ttvd: error: ")
    assert "tent" in error
    assert len(error.splitlines()) == 1
    monkeypatch.setenv("TTVD_DEBUG", "1")
    with pytest.raises(ValueError, match="tent"):
        main()


@pytest.mark.parametrize("arguments", [["nonsense"], ["demo", "--seed", "-1"], ["demo", "--nonsense"]])
def test_bad_usage_has_code_2(arguments: list[str]) -> None:
    assert run_cli(*arguments).exit_code == 2


def test_methods_lists_the_registry() -> None:
    output = check_cli("methods")
    assert all(f" {name} " in output for name in list_methods())


@pytest.mark.parametrize("name", list(list_methods()))
def test_every_parameter_is_explained(name: str) -> None:
    output = run_cli("methods", name, columns=4000).output
    lines = {line.split()[0]: line for line in output.splitlines() if line.startswith(" ")}
    for parameter in list_methods()[name].parameters():
        assert re.search(rf"^ {parameter} +\S.*  \S+ \S+", lines[parameter])
        assert "`" not in lines[parameter]


def test_a_method_of_the_user_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder(tmp_path, monkeypatch)
    assert "Factor of the logits" in check_cli("methods", write_method(tmp_path))


def test_methods_of_installed_packages_are_listed(tmp_path: Path) -> None:
    """In a process of its own, because entry points are looked up once."""
    package = tmp_path / "scaled_plugin-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: scaled-plugin\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[ttvd.methods]\nscaled = {write_method(tmp_path)}\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])}
    command = [sys.executable, "-m", "ttvd", "methods"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert re.search(r"^ scaled ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("lr=1e-3", 0.001),
        ("steps=2", 2),
        ("optimizer=sgd", "sgd"),
        ('optimizer="sgd"', "sgd"),
        ("capture=false", False),
        ("day=2024-01-01", "2024-01-01"),
        ("text=a = b", "a = b"),
        ("text=1\nlr = 2", "1\nlr = 2"),
        ("text=", ""),
    ],
)
def test_values_of_parameters_are_literals_of_toml(pair: str, value: object) -> None:
    [(_, found)] = parse_parameters([pair], find_method("tent")).items()
    assert found == value
    assert type(found) is type(value)


def test_a_parameter_can_take_a_number_or_a_word() -> None:
    method = find_method("vd")
    assert parse_parameters(["output_temperature=0.5"], method) == {"output_temperature": 0.5}
    assert parse_parameters(["output_temperature=source"], method) == {"output_temperature": "source"}
