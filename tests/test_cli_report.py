"""``ttvd report`` on real stores."""

from pathlib import Path

import pytest
import typer.testing

from tests.helpers.report import FIXED, FakeStore
from ttvd.bench.store import Store
from ttvd.cli.main import app

RUNNER = typer.testing.CliRunner()


def save(path: Path, seeds: str = "[0, 1]") -> Path:
    fake = FakeStore(("small", FIXED.replace("[0, 1]", seeds)), batches=3)
    with Store(path) as store:
        store.save_recipe("small", fake.texts["small"], fake.members("small"))
        for run in fake.runs.values():
            store.add(run)
    return path


def report(*arguments: object) -> typer.testing.Result:
    return RUNNER.invoke(app, ["report", *map(str, arguments)], env={"COLUMNS": "200"})


def test_a_page_and_its_tables(tmp_path: Path) -> None:
    store = save(tmp_path / "runs.db")
    before = store.read_bytes()
    result = report(store, "--out", tmp_path / "out", "--reference", "bn")
    assert result.exit_code == 0, result.output
    html = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "Complete: every run" in result.output
    assert str(tmp_path / "out" / "index.html") in result.output
    assert "more (+) or less (-) than bn" in html or "less than bn" in html
    assert "Minimises the entropy" in html
    assert (tmp_path / "out" / "tables" / "small-error.tex").is_file()
    assert store.read_bytes() == before


def test_packed_runs_give_the_same_tables(tmp_path: Path) -> None:
    store = save(tmp_path / "runs.db")
    RUNNER.invoke(app, ["runs", str(store), "--pack", str(tmp_path / "rows")])
    for source, out in ((store, "a"), (tmp_path / "rows" / "small.csv", "b")):
        assert report(source, "--out", tmp_path / out).exit_code == 0
    tables = [
        {path.name: path.read_bytes() for path in (tmp_path / out / "tables").iterdir()} for out in "ab"
    ]
    assert tables[0] == tables[1]
    result = report(store, "--against", tmp_path / "rows" / "small.csv", "--out", tmp_path / "c")
    assert "both stores hold the same runs with the same rows" in result.output


@pytest.mark.parametrize("option", ["--against", "--since"])
def test_what_changed(tmp_path: Path, option: str) -> None:
    now, before = save(tmp_path / "now.db"), save(tmp_path / "before.db", "[0]")
    result = report(now, option, before, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    html = (tmp_path / "out" / "changes.html").read_text(encoding="utf-8")
    assert "What changed: now.db against before.db" in html
    assert not (tmp_path / "out" / "index.html").exists()


def test_stores_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    now, before = save(tmp_path / "runs.db"), save(tmp_path / "old" / "runs.db")
    assert report(now, "--since", before, "--out", tmp_path / "out").exit_code == 0
    assert str(before) in (tmp_path / "out" / "changes.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}/none.db"], "there is no store"),
        (["{folder}/runs.db", "--recipe", "smal"], "no recipe 'smal'"),
        (["{folder}/runs.db", "--reference", "tnet"], "no line is called 'tnet'"),
        (["{folder}/runs.db", "--since", "{folder}/none.db"], "there is no store"),
        (["{folder}/runs.db", "--since", "{folder}/runs.db", "--reference", "bn"], "compares whole stores"),
        (["{folder}/empty.db"], "holds no recipe"),
    ],
)
def test_bad_questions(tmp_path: Path, arguments: list[str], message: str) -> None:
    save(tmp_path / "runs.db")
    Store(tmp_path / "empty.db").close()
    filled = [argument.format(folder=tmp_path) for argument in arguments]
    result = report(*filled, "--out", tmp_path / "out")
    assert isinstance(result.exception, ValueError | OSError)
    assert message in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_a_file_is_no_folder_for_the_page(tmp_path: Path) -> None:
    store = save(tmp_path / "runs.db")
    result = report(store, "--out", store)
    assert isinstance(result.exception, NotADirectoryError)
    assert "is a file; give a folder" in str(result.exception)
