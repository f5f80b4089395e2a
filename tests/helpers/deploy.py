"""`ttvd adapt` as the tests call it."""

import csv
from pathlib import Path

from typer.testing import CliRunner

from ttvd.cli.main import app

RUNNER = CliRunner()


def run_adapt(source: Path, out: Path, *options: str, method: str = "ttvd") -> list[dict[str, str]]:
    arguments = [
        "adapt",
        str(source),
        "--model",
        "digits-sla",
        "--out",
        str(out),
        "--method",
        method,
        *options,
    ]
    result = RUNNER.invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    with out.open(newline="") as file:
        return list(csv.DictReader(file))
