import csv
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cli import check_cli, refuse_cli
from ttvd.bench import Record, Row
from ttvd.bench.spec import Domain, Facts, Member, Run, Spec
from ttvd.bench.store import Owner, Store
from ttvd.cli.main import main
from ttvd.files import unescape_cell

FACTS = Facts("5f3a", "cpu", 1, {"ttvd": "0.1.0"}, 1.7e9, 12.25, 4096, 4.0, 0.5)


def make_spec(method: str, corruption: str = "fog", seed: int = 0) -> Spec:
    domains = (Domain(corruption), Domain("none"))[:1]
    return Spec(
        "digits-sla", "0" * 16, "digits", "1" * 16, domains, method, parameters={"lr": 0.1}, seed=seed
    )


def make_run(spec: Spec, correct: int) -> Run:
    state: dict[str, float | list[float]] = {"n": 8, "correct": correct, "nll_sum": 0.1, "brier_sum": 0.2}
    state |= {"batch_ece_sum": 0.3, "bin_count": [0.0, 8.0], "bin_confidence": [0.0, 8.0]}
    return Run(spec, Record((Row({**state, "bin_correct": [0.0, float(correct)]}, 0.5, 0.1),) * 2), FACTS)


DONE = [make_run(make_spec("tent"), 6), make_run(make_spec("bn", "gaussian_noise", seed=1), 4)]
FAILED, MISSING, RUNNING = make_spec("t3a", "none"), make_spec("tent", seed=2), make_spec("tent", seed=3)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two runs are done, one has failed, one is being done, one is missing."""
    path = tmp_path / "runs.db"
    specs = [DONE[0].spec, FAILED, MISSING, RUNNING]
    with Store(path) as opened:
        opened.save_recipe(
            "smoke", "", [Member("smoke", f"line [b]{spec.method}", "test", spec) for spec in specs]
        )
        opened.save_recipe("other", "", [Member("other", "Tent", "test", DONE[0].spec)])
        for run in DONE:
            opened.add(run)
        opened.fail(FAILED, "Traceback (most recent call last):\n  [red]ValueError: too few images")
        opened.claim([RUNNING.key], Owner.current())
    return path


def invoke(*arguments: str | Path) -> str:
    return check_cli("runs", *arguments)


def listed(*arguments: str | Path) -> list[str]:
    """Keys of the list, in its order."""
    lines = invoke(*arguments).splitlines()
    return [line.split()[0] for line in lines if len(line.split()[0]) == len(FAILED.key)]


def test_the_list_shows_every_run_with_its_numbers(store: Path) -> None:
    lines = [" ".join(line.split()) for line in invoke(store).splitlines()]
    assert lines == [
        "key label method domain seed error % ECE % seconds status",
        f"{DONE[0].spec.key} Tent, line [b]tent tent fog 5 0 25.00 25.00 12.2 done",
        f"{DONE[1].spec.key} - bn gaussian noise 5 1 50.00 50.00 12.2 done",
        f"{FAILED.key} line [b]t3a t3a clean 0 - - - failed",
        f"{MISSING.key} line [b]tent tent fog 5 2 - - - missing",
        f"{RUNNING.key} line [b]tent tent fog 5 3 - - - running",
        "2 done, 1 failed, 1 running, 1 missing",
    ]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["--method", "bn"], [DONE[1].spec]),
        (["--domain", "gaussian noise 5"], [DONE[1].spec]),
        (["--domain", "gaussian_noise"], [DONE[1].spec]),
        (["--domain", "clean"], [FAILED]),
        (["--recipe", "other"], [DONE[0].spec]),
        (["--recipe", "smoke", "--method", "tent"], [DONE[0].spec, MISSING, RUNNING]),
        (["--seed", "2"], [MISSING]),
        (["--status", "failed"], [FAILED]),
        (["--status", "running"], [RUNNING]),
        (["--status", "failed", "--seed", "9"], []),
    ],
)
def test_filters(store: Path, filters: list[str], expected: list[Spec]) -> None:
    assert listed(store, *filters) == [spec.key for spec in expected]


def test_one_run(store: Path) -> None:
    text = invoke(store, DONE[0].spec.key[:8])
    for part in (
        "other: Tent",
        "smoke: line [b]tent",
        '{"lr": 0.1}',
        "error      0.25",
        "device     cpu",
        "12.25",
    ):
        assert part in text


def test_one_failed_run_shows_its_traceback(store: Path) -> None:
    text = invoke(store, FAILED.key)
    assert "Traceback (most recent call last):\n  [red]ValueError: too few images" in text
    assert "facts" not in text


def test_json(store: Path) -> None:
    documents = json.loads(invoke(store, "--json"))
    assert [one["status"] for one in documents] == ["done", "done", "failed", "missing", "running"]
    assert documents[0]["spec"] == DONE[0].spec.document()
    assert documents[0]["metrics"]["error"] == 0.25
    one = json.loads(invoke(store, FAILED.key, "--json"))
    assert one["asked"] == [{"recipe": "smoke", "label": "line [b]t3a"}]
    assert one["failure"]["text"].endswith("too few images")
    assert json.loads(invoke(store, "--json", "--status", "failed", "--seed", "9")) == []


def read_table(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return pq.read_table(path).to_pylist()  # type: ignore[no-any-return]
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_export_of_runs(store: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "new folder" / f"runs{suffix}"
    assert "5 runs in" in invoke(store, "--export", path)
    lines = read_table(path)
    assert [line["key"] for line in lines] == [
        *(run.spec.key for run in DONE),
        FAILED.key,
        MISSING.key,
        RUNNING.key,
    ]
    assert {field.name for kind in (Spec, Facts) for field in fields(kind)} <= set(lines[0])
    first = lines[0]
    assert (first["recipe"], first["label"], first["domain"]) == (
        "other, smoke",
        "Tent, line [b]tent",
        "fog 5",
    )
    assert (float(first["error"]), int(first["batches"]), float(first["kept"])) == (0.25, 2, 0.5)
    assert json.loads(first["parameters"]) == {"lr": 0.1}
    assert lines[2]["error"] in ("", None)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_export_of_batches(store: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"batches{suffix}"
    assert "2 batches in" in invoke(store, "--export", path, "--batches", "--method", "tent")
    lines = read_table(path)
    assert [(line["key"], int(line["number"]), int(line["correct"])) for line in lines] == [
        (DONE[0].spec.key, number, 6) for number in range(2)
    ]
    bins = lines[0]["bin_count"]
    assert (json.loads(bins) if suffix == ".csv" else bins) == [0.0, 8.0]


def test_batches_of_several_domains_are_named(tmp_path: Path) -> None:
    spec = replace(make_spec("tent"), domains=(Domain("fog"), Domain("snow", 3)))
    run = make_run(spec, 6)
    rows = (run.record.rows[0], replace(run.record.rows[0], domain=1))
    with Store(tmp_path / "runs.db") as store:
        store.add(replace(run, record=Record(rows)))
    invoke(tmp_path / "runs.db", "--export", tmp_path / "a.csv", "--batches", "--domain", "continual")
    assert [line["domain"] for line in read_table(tmp_path / "a.csv")] == ["fog 5", "snow 3"]


def test_an_empty_store_and_an_empty_export(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    Store(path).close()
    assert invoke(path) == "no runs\n"
    for name in ("a.csv", "a.parquet"):
        assert "0 batches" in invoke(path, "--export", tmp_path / name, "--batches")
        assert read_table(tmp_path / name) == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--method", "tnt"], "'tent'"),
        (["--domain", "fgo"], "'fog'"),
        (["--recipe", "smke"], "'smoke'"),
        (["--status", "ended"], "done, failed, missing, running"),
        (["zz"], "'zz'"),
        (["--batches"], "--export FILE"),
        (["--overwrite"], "--export FILE"),
        (["--replace"], "--pack FOLDER"),
        (["--export", "runs.txt"], ".csv or .parquet"),
    ],
)
def test_bad_input_is_refused(store: Path, arguments: list[str], word: str) -> None:
    assert word in refuse_cli("runs", store, *arguments)


def test_packed_runs_are_listed_and_exported_like_a_store(store: Path, tmp_path: Path) -> None:
    text = invoke(store, "--pack", tmp_path / "rows", "--recipe", "smoke")
    assert text.strip() == f"1 of 4 runs in {tmp_path / 'rows' / 'smoke.csv'}"
    rows = tmp_path / "rows" / "smoke.csv"
    lines = [" ".join(line.split()) for line in invoke(rows).splitlines()]
    assert f"{DONE[0].spec.key} line [b]tent tent fog 5 0 25.00 25.00 12.2 done" in lines
    assert lines[-1] == "1 done, 1 failed, 2 missing"
    assert invoke(rows, DONE[0].spec.key[:8]).startswith(f"run {DONE[0].spec.key}: done")
    assert "1970" not in invoke(rows, FAILED.key)
    invoke(rows, "--export", tmp_path / "runs.csv")
    assert "--batches" in refuse_cli("runs", rows, "--batches", "--export", tmp_path / "a.csv")


def test_all_recipes_are_packed_and_come_back(store: Path, tmp_path: Path) -> None:
    invoke(store, "--pack", tmp_path / "rows")
    assert sorted(path.name for path in (tmp_path / "rows").iterdir()) == [
        *("other.csv", "other.toml", "smoke.csv", "smoke.toml")
    ]
    new = tmp_path / "new.db"
    assert "1 of 1 runs were new" in invoke(new, "--unpack", tmp_path / "rows" / "smoke.csv")
    assert "0 of 1 runs were new" in invoke(new, "--unpack", tmp_path / "rows" / "smoke.csv")
    with Store(new) as opened, Store(store) as before:
        assert opened.recipes() == {"smoke": ""}
        assert opened.members("smoke") == before.members("smoke")
        assert opened.load(opened.done())[DONE[0].spec.key].totals == DONE[0].totals


def test_packing_adds_and_replaces(store: Path, tmp_path: Path) -> None:
    arguments = (store, "--recipe", "other", "--pack", tmp_path / "rows")
    invoke(*arguments)
    with Store(store) as opened:
        opened.save_recipe("other", "", [Member("other", "Tent", "test", MISSING)])
    assert "1 of 2 runs in" in invoke(*arguments)
    assert "0 of 1 runs in" in invoke(*arguments, "--replace")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--pack", "rows", "--method", "tent"], "whole recipes"),
        (["--pack", "rows", "--unpack", "x.csv"], "no other options"),
        (["--unpack", "x.csv", "--recipe", "smoke"], "no other options"),
        (["--unpack", "x.db"], ".csv file"),
        (["--pack", "rows", "--recipe", "smok"], "smoke"),
    ],
)
def test_what_cannot_be_packed(store: Path, arguments: list[str], word: str) -> None:
    assert word in refuse_cli("runs", store, *arguments)
    assert not Path("rows").exists()


def test_the_store_is_not_overwritten_by_its_export(store: Path) -> None:
    odd = store.rename(store.with_suffix(".csv"))
    assert "the store itself" in refuse_cli("runs", odd, "--export", odd, "--overwrite")


def test_an_export_that_exists_is_replaced_only_on_request(store: Path, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("precious")
    assert "--overwrite" in refuse_cli("runs", store, "--export", path)
    assert path.read_text() == "precious"
    assert "5 runs" in invoke(store, "--export", path, "--overwrite")
    assert "folder" in refuse_cli("runs", store, "--export", tmp_path / "runs.csv" / "a.csv")


def test_faults_of_the_store_end_with_code_2_and_without_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a store at all")
    monkeypatch.setattr(sys, "argv", ["ttvd", "runs", str(path)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ttvd: error: {path} is not a store")
    assert len(error.splitlines()) == 1


def test_runs_that_differ_in_their_settings_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "grid.db"
    specs = [replace(make_spec("tent"), parameters={"lr": lr}, batch_size=8) for lr in (0.1, 0.2)]
    with Store(path) as opened:
        for spec in specs:
            opened.add(make_run(spec, 6))
    text = invoke(path)
    assert "setting" in text
    assert "lr 0.1" in text
    assert "lr 0.2" in text
    assert "batch size" not in text


def test_filters_that_leave_nothing_say_so(store: Path) -> None:
    assert "no runs match; 2 runs" in invoke(store, "--seed", "9")


def test_an_export_holds_no_formulas(tmp_path: Path) -> None:
    with Store(tmp_path / "runs.db") as opened:
        opened.save_recipe("=recipe", "", [Member("=recipe", "@label\nnext", "test", MISSING)])
    invoke(tmp_path / "runs.db", "--export", tmp_path / "runs.csv")
    (line,) = read_table(tmp_path / "runs.csv")
    assert (line["recipe"], line["label"]) == (r"\x3drecipe", r"\x40label\x0anext")
    assert unescape_cell(line["label"]) == "@label\nnext"
