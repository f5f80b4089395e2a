"""Recipes cut down on the command line, and a trial held against rows that are there."""

import sys
from pathlib import Path

import pytest
import typer.testing
from tools import check_rows

from ttvd.bench.plan import plan
from ttvd.bench.recipe import cut_limit, cut_lines, cut_seeds, list_entries, parse_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import WorkerConfig
from ttvd.cli.main import app

TEXT = """
data.set = "digits"
data.corruptions = ["fog"]
reference = "bn"
checkpoints.plain = "digits-plain"
grid.lr = [0.01, 0.001]

[[methods]]
name = ["source", "bn", "tent"]

[[methods]]
name = "bn"
label = "SLA + bn"
checkpoint = "digits-sla"
views = 4
seeds = [3, 4]
"""
RUNNER = typer.testing.CliRunner()


def run(*arguments: object) -> str:
    result = RUNNER.invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def test_lines_that_stay_ask_for_the_same_runs() -> None:
    recipe, resources = parse_recipe(TEXT, "small"), Resources(WorkerConfig())
    cut = cut_lines(recipe, ["tent", "SLA + bn"])
    assert [entry.label for entry in list_entries(cut)] == ["tent", "SLA + bn"]
    wanted = [member for member in plan(recipe, resources) if member.label in ("tent", "SLA + bn")]
    assert plan(cut, resources) == wanted


def test_a_reference_is_kept_where_it_is_one_of_them() -> None:
    recipe = parse_recipe(TEXT, "small")
    assert cut_lines(recipe, ["bn", "source"]).reference == "bn"
    assert cut_lines(recipe, ["source"]).reference is None


def test_a_line_that_is_not_there_is_missed_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="no line 'Tent'; it has: source, bn, tent, SLA"):
        cut_lines(parse_recipe(TEXT, "small"), ["bn", "Tent"])


def test_limits_and_seeds_are_those_of_all_lines() -> None:
    recipe = cut_seeds(cut_limit(parse_recipe(TEXT, "small"), 128), (7,))
    specs = [member.spec for member in plan(recipe, Resources(WorkerConfig()))]
    assert {(spec.limit, spec.seed) for spec in specs} == {(128, 7)}


def test_a_trial_agrees_with_the_rows_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.toml").write_text(TEXT)
    common = ["bench", tmp_path / "small.toml", "--only", "bn", "--jobs", 1]
    run(*common, "--store", tmp_path / "whole.db")
    run("runs", tmp_path / "whole.db", "--pack", tmp_path / "rows")
    output = run(*common, "--store", tmp_path / "trial.db", "--limit", 192)
    assert "1 run to do" in output
    assert "SLA + bn" not in output, "the table has the lines that were asked for"
    run("report", tmp_path / "trial.db", "--out", tmp_path / "page")

    def check(trial: str, rows: str = "rows/small.csv") -> object:
        monkeypatch.setattr(sys, "argv", ["check_rows", str(tmp_path / trial), str(tmp_path / rows)])
        with pytest.raises(SystemExit) as exit_:
            check_rows.main()
        return exit_.value.code

    assert check("trial.db") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["bn", "1"]
    assert "missing.db" in str(check("missing.db"))
    (tmp_path / "other.toml").write_text(TEXT)
    run("bench", tmp_path / "other.toml", "--only", "source", "--store", tmp_path / "other.db", "--limit", 64)
    assert "no recipe in common" in str(check("other.db"))


def test_more_than_chance_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = {"good": [check_rows.Pair(0.30, 0.28, 0.01)], "bad": [check_rows.Pair(0.30, 0.27, 0.01)]}
    monkeypatch.setattr(check_rows, "find_pairs", lambda trial, shipped: pairs)
    (tmp_path / "small.toml").write_text(TEXT)
    run("bench", tmp_path / "small.toml", "--only", "source", "--limit", 64, "--store", tmp_path / "a.db")
    monkeypatch.setattr(sys, "argv", ["check_rows", str(tmp_path / "a.db"), str(tmp_path / "a.db")])
    with pytest.raises(SystemExit) as exit_:
        check_rows.main()
    assert exit_.value.code == 1
    good, bad = capsys.readouterr().out.splitlines()[1:]
    assert "more than chance" in bad
    assert "more than chance" not in good
