"""A trial held against rows that are there."""

import sys
from pathlib import Path

import pytest
from tools import check_rows

from tests.helpers.bench import shared_resources
from ttvd.bench.job import execute
from ttvd.bench.packed import open_runs, pack_runs
from ttvd.bench.plan import plan
from ttvd.bench.recipe import Recipe, cut_limit, cut_lines, parse_recipe
from ttvd.bench.store import Store

TEXT = """
data.set = "digits"
data.corruptions = ["fog"]
checkpoints.plain = "digits-plain"
methods = [{name = ["source", "bn"]}]
"""


def fill(path: Path, recipe: Recipe) -> None:
    members = plan(recipe, shared_resources())
    with Store(path) as store:
        store.save_recipe(recipe.name, recipe.text, members)
        for member in members:
            store.add(execute(member.spec, shared_resources()))


def check(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> object:
    monkeypatch.setattr(sys, "argv", ["check_rows", *map(str, paths)])
    with pytest.raises(SystemExit) as exit_:
        check_rows.main()
    return exit_.value.code


def test_a_trial_agrees_with_the_rows_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = cut_lines(parse_recipe(TEXT, "small"), ["bn"])
    fill(tmp_path / "whole.db", whole)
    fill(tmp_path / "trial.db", cut_limit(whole, 192))
    with open_runs(tmp_path / "whole.db") as runs:
        pack_runs(runs, "small", tmp_path / "rows")
    rows = tmp_path / "rows" / "small.csv"
    assert check(monkeypatch, tmp_path / "trial.db", rows) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["bn", "1"]
    assert "missing.db" in str(check(monkeypatch, tmp_path / "missing.db", rows))
    fill(tmp_path / "other.db", cut_limit(cut_lines(parse_recipe(TEXT, "other"), ["source"]), 64))
    assert "no recipe in common" in str(check(monkeypatch, tmp_path / "other.db", rows))


def test_more_than_chance_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = {"good": [check_rows.Pair(0.30, 0.28, 0.01)], "bad": [check_rows.Pair(0.30, 0.27, 0.01)]}
    monkeypatch.setattr(check_rows, "find_pairs", lambda trial, shipped: pairs)
    fill(tmp_path / "a.db", cut_limit(cut_lines(parse_recipe(TEXT, "small"), ["source"]), 64))
    assert check(monkeypatch, tmp_path / "a.db", tmp_path / "a.db") == 1
    good, bad = capsys.readouterr().out.splitlines()[1:]
    assert "more than chance" in bad
    assert "more than chance" not in good
