"""A folder of results: made from its rows alone, the same bytes each time, and true to them."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

import ttvd
from tests.report.fakes import BASIC, FakeStore
from tests.report.test_paper import PAPER, TEXT
from ttvd.bench.packed import pack_runs
from ttvd.bench.store import Store
from ttvd.report.folder import list_rows, pick_main, read_study, write_results
from ttvd.report.main_table import BEGIN, END, MAIN, fill_markers, main_table
from ttvd.report.paper import read_paper

ROOT = Path(ttvd.__file__).parents[2]
SIZES = BASIC.replace("[grid]", "[stream]\nbatch_size = [64, 8]\n[grid]")


def pack(folder: Path, name: str, text: str, fake: FakeStore | None = None) -> Path:
    store = fake or FakeStore((name, text), batches=12)
    return pack_runs(cast(Store, store), name, folder / "rows")[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "paper.toml").write_bytes(PAPER.read_bytes())
    return tmp_path


def read(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_bytes_each_time(folder: Path) -> None:
    pack(folder, "table1-cifar10", TEXT)
    pack(folder, "sizes", SIZES)
    (folder / "README-main.md").write_text(f"# x\n{BEGIN}\n{END}\n", encoding="utf-8")
    write_results(folder, folder / "README-main.md")
    first = read(folder)
    assert {
        "README.md", "table1-cifar10.md", "sizes.md", "figures/table1-cifar10-curves.svg",
        "figures/table1-cifar10-paired.svg", "figures/sizes-conditions.svg",
    } <= set(first)  # fmt: skip
    write_results(folder, folder / "README-main.md")
    assert read(folder) == first


def test_what_has_no_rows_any_more_goes(folder: Path) -> None:
    rows = pack(folder, "sizes", SIZES)
    (folder / "notes.md").write_bytes("# Von RayWorker geschrieben: f\xfcr mich\n".encode("latin-1"))
    (folder / "figures").mkdir()
    (folder / "figures" / "drawn.svg").write_text("<svg/>", encoding="utf-8")
    write_results(folder)
    made = {name for name in read(folder) if name.endswith(".svg")} - {"figures/drawn.svg"}
    assert made
    rows.unlink()
    write_results(folder)
    assert set(read(folder)) == {
        *("README.md", "paper.toml", "notes.md", "rows/sizes.toml", "figures/drawn.svg")
    }
    assert "No rows yet" in (folder / "README.md").read_text(encoding="utf-8")


def test_numbers_are_those_of_the_rows(folder: Path) -> None:
    results = read_study(pack(folder, "table1-cifar10", TEXT))
    write_results(folder)
    text = (folder / "table1-cifar10.md").read_text(encoding="utf-8")
    section = text.partition("## Error: rules side by side")[2].partition("\n## ")[0]
    rows = {
        cells[1].strip(): cells
        for cells in (line.split("|") for line in section.splitlines())
        if len(cells) > 3
    }
    for line in results.lines:
        shown = re.findall(r"\d+\.\d", " ".join(rows[line.label][2:]))
        assert f"{100 * (line.mean('error', results.columns) or 0):.1f}" in shown
    for title in (
        "Next to the paper",
        "All lines",
        "Error by domain",
        "ECE over the stream by domain",
        "Who beats whom",
    ):
        assert f"\n## {title}\n" in text
    assert "paper: TENT" in text
    assert "TTT (error): it prints 21.3" in text


def test_above_each_table_and_picture_stands_how_it_was_made(folder: Path) -> None:
    fake = FakeStore(("sizes", SIZES), batches=3)
    for number, (key, run) in enumerate(list(fake.runs.items())):
        if number % 2:
            versions = {**run.facts.versions, "torch": "2.11.0+cu128", "compiled": "inductor"}
            fake.runs[key] = replace(run, facts=replace(run.facts, device="NVIDIA H200", versions=versions))
    pack(folder, "sizes", SIZES, fake)
    write_results(folder)
    text = (folder / "sizes.md").read_text(encoding="utf-8")
    parts = text.split("\n## ")[1:]
    tables, pictures = ([part for part in parts if mark in part] for mark in ("|---", "!["))
    assert len(tables) > 8
    assert len(pictures) > 1
    for part in tables + pictures:
        before = re.split(r"\|---|!\[", part)[0]
        assert "> `ttvd bench recipes/sizes.toml --store out/sizes.db --device cuda --compile`" in before
        assert "Seeds: 0, 1." in before
        assert "digits, corruptions: generated with CIFAR-10-C's constants" in before
        assert "AMD EPYC 9V74 80-Core Processor; NVIDIA H200" in before
        assert "torch 2.11.0+cu128" in before
        assert "torch 2.13.0" in before
        assert re.search(r"Measured: 2026-\d\d-\d\d \d\d:\d\d to 2026", before)


def test_rows_that_do_not_fit_their_recipe_are_refused_and_nothing_is_written(folder: Path) -> None:
    recipe = pack(folder, "sizes", SIZES).with_suffix(".toml")
    before = read(folder)
    for name in ('"tent", "ttvd", "sar"', '"tnet", "ttvd"'):
        recipe.write_text(SIZES.replace('"tent", "ttvd"', name), encoding="utf-8")
        with pytest.raises(
            ValueError, match=r"sizes\.toml is not the recipe that sizes\.csv was packed with"
        ):
            write_results(folder)
    assert set(read(folder)) == set(before)


def test_lines_that_a_recipe_does_not_have_are_refused(folder: Path) -> None:
    fake = FakeStore(("sizes", SIZES), batches=3)
    fake.texts = {"sizes": SIZES.replace('"tent", "ttvd"', '"tent", "ttvd", "sar"')}
    pack(folder, "sizes", SIZES, fake)
    with pytest.raises(ValueError, match="lines that only one has: sar"):
        write_results(folder)


def test_gaps_are_told(folder: Path) -> None:
    fake = FakeStore(("sizes", SIZES), batches=3)
    fake.lose(next(iter(fake.runs)))
    pack(folder, "sizes", SIZES, fake)
    write_results(folder)
    assert "**Not complete**: 0 runs failed, 1 are not done" in (folder / "sizes.md").read_text(
        encoding="utf-8"
    )


def test_the_main_table_has_each_rule_and_the_paper(folder: Path) -> None:
    results = read_study(pack(folder, "table1-cifar10", TEXT))
    text = main_table([results], read_paper(folder / "paper.toml"))
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert set(lines) == {"method", "source", "bn", "tent", "ttvd-reference", "ttvd", "SLA + tent"}
    chosen = {(line.label, line.rule): line for line in results.lines}
    for rule in ("grid-best", "validation"):
        assert f"{100 * (chosen['tent', rule].mean('error', results.columns) or 0):.1f}" in lines["tent"]
    assert lines["tent"].split("|")[2].strip() == "24.0"
    assert lines["SLA + tent"].split("|")[2].strip() == ""  # a control that the paper does not have
    assert "`ttvd bench recipes/table1-cifar10.toml" in text
    assert f"{len(results.all_runs())} runs; seeds 0; digits, corruptions: generated" in text
    assert main_table([], {}) == ""


def test_markers() -> None:
    text = f"# Title\n\n{BEGIN}\nold\n{END}\n\nmore\n"
    filled = fill_markers(text, "| a |\n")
    assert filled == f"# Title\n\n{BEGIN}\n\n| a |\n\n{END}\n\nmore\n"
    assert fill_markers(filled, "| a |\n") == filled
    assert fill_markers("no markers", "| a |\n") == "no markers"
    assert fill_markers(text, "") == text
    for wrong in (BEGIN, f"{END} {BEGIN}", f"{BEGIN}{BEGIN}{END}"):
        with pytest.raises(ValueError, match="each once and in this order"):
            fill_markers(wrong, "| a |\n")


def test_the_readme_shows_the_committed_rows() -> None:
    printed = read_paper(PAPER)
    several = [read_study(path) for path in list_rows(ROOT / "results") if path.stem in MAIN]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert fill_markers(text, main_table(pick_main(several), printed)) == text


def test_the_index_names_the_committed_rows(folder: Path) -> None:
    rows = list_rows(ROOT / "results")
    if not rows:  # else it is too slow for a test, and `make results` followed by git diff tells
        shutil.copytree(ROOT / "results", folder, dirs_exist_ok=True)
        write_results(folder)
        assert (folder / "README.md").read_bytes() == (ROOT / "results" / "README.md").read_bytes()
    index = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    assert all(f"]({path.stem}.md)" in index for path in rows)
    assert all(path.with_suffix(".toml").is_file() for path in rows)
