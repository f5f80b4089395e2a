"""A folder of results is made from its rows alone, with the same bytes each time."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import cast

import pytest

import ttvd
from tests.helpers.report import BASIC, FakeStore, pick
from ttvd.bench.packed import pack_runs
from ttvd.bench.store import Store
from ttvd.bench.study import study
from ttvd.report.results import BATCH_ECE, ECE, ERROR, Results
from ttvd.report.results_folder import (
    BEGIN,
    END,
    MAIN,
    Printed,
    add_paper_rows,
    fill_markers,
    list_rows,
    main_table,
    paper_table,
    pick_main,
    read_paper,
    read_study,
    readme_table,
    write_results,
)
from ttvd.report.tables import domain_table

ROOT = Path(ttvd.__file__).parents[2]
SIZES = BASIC.replace("[grid]", "[stream]\nbatch_size = [64, 8]\n[grid]")
PAPER = Path(ttvd.__file__).parents[2] / "results" / "paper.toml"
TEXT = """
title = "Table"
rules = ["grid-best", "validation", "oracle"]
reference = "ttvd"
checkpoints = { plain = "digits-plain", sites = "digits-sla" }
[data]
set = "digits"
corruptions = ["fog", "gaussian_noise"]
[grid]
lr = [0.001, 0.0005]
[[methods]]
name = ["source", "bn", "tent", "ttvd-reference", "ttvd"]
[[methods]]
name = "tent"
label = "SLA + tent"
checkpoint = "digits-sla"
views = 4
"""


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
        "Paired comparisons",
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
    assert "**Not complete: 0 runs failed, 1 not done" in (folder / "sizes.md").read_text(encoding="utf-8")


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


def test_the_table_of_the_readme_shows_the_rules_without_test_labels(folder: Path) -> None:
    results = read_study(pack(folder, "table1-cifar10", TEXT))
    lines = [line.split("|") for line in readme_table([results]).splitlines() if line.startswith("| ")]
    names = [line[1].strip() for line in lines]
    assert names == ["method", "source", "bn", "Tent", "SLA + Tent", "ttvd"]
    chosen = pick(results, "tent", "validation")
    assert f"{100 * (chosen.mean('error', results.columns) or 0):.1f}" in lines[names.index("Tent")][2]
    assert sum("**" in line[2] for line in lines) == 1
    assert readme_table([]) == ""


def test_the_readme_shows_the_committed_rows() -> None:
    several = [read_study(path) for path in list_rows(ROOT / "results") if path.stem in MAIN]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert fill_markers(text, readme_table(pick_main(several))) == text


def test_the_index_names_the_committed_rows(folder: Path) -> None:
    rows = list_rows(ROOT / "results")
    if not rows:  # else it is too slow for a test, and `make results` followed by git diff tells
        shutil.copytree(ROOT / "results", folder, dirs_exist_ok=True)
        write_results(folder)
        assert (folder / "README.md").read_bytes() == (ROOT / "results" / "README.md").read_bytes()
    index = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    assert all(f"]({path.stem}.md)" in index for path in rows)
    assert all(path.with_suffix(".toml").is_file() for path in rows)


@pytest.fixture(scope="module")
def printed() -> Printed:
    return read_paper(PAPER)["table1-cifar10"]


@pytest.fixture(scope="module")
def results() -> Results:
    return Results(study(cast(Store, FakeStore(("table1-cifar10", TEXT), batches=4)), "table1-cifar10"))


def test_the_file_is_whole() -> None:
    paper = read_paper(PAPER)
    assert set(paper) == {"table1-cifar10", "table1-cifar100", "ablation-cifar10"}
    for name, numbers in paper.items():
        methods = 3 if name.startswith("ablation") else 10
        assert {len(rows) for rows in numbers.rows.values()} == {methods}
        assert {len(row) for rows in numbers.rows.values() for row in rows.values()} == {15}
        assert all(
            0 < value < 100
            for rows in numbers.rows.values()
            for row in rows.values()
            for value in row.values()
        )
        for metric in numbers.rows if numbers.main else ():  # its first table repeats the averages
            assert {n: e[metric] for n, e in numbers.main.items()} == dict(numbers.averages[metric])
    ablation, table = paper["ablation-cifar10"].rows["error"], paper["table1-cifar10"].rows["error"]
    assert ablation["CIPD"] == table["TTVD"]  # the same method under two names, in another order of columns


def test_slips_are_found_and_no_others() -> None:
    slips = {name: numbers.slips() for name, numbers in read_paper(PAPER).items()}
    assert slips == {
        "table1-cifar10": ["TTT (error): it prints 21.3, its row has the mean 20.79"],
        "table1-cifar100": ["SAR (error): it prints 53.7, its row has the mean 53.95"],
        "ablation-cifar10": [],
    }


def test_numbers_stand_beside_ours_of_the_same_rule(results: Results, printed: Printed) -> None:
    table = paper_table(results, printed)
    rows = {row[0].text: row for row in table.rows}
    assert list(rows) == ["bn", "tent", "ttvd-reference", "ttvd"]  # neither source nor controls: it has none
    lines = {(line.label, line.rule): line for line in results.lines}
    tent = [cell.value for cell in rows["tent"][2:]]
    means = {
        rule: 100 * (lines["tent", rule].mean("error", results.columns) or 0)
        for rule in ("grid-best", "oracle")
    }
    assert tent[0] == pytest.approx(fmean(printed.rows["error"]["TENT"].values()))
    assert tent[1] == pytest.approx(means["grid-best"])
    assert tent[3] == 21.7
    assert tent[4] == pytest.approx(means["oracle"])
    assert tent[5] == pytest.approx(fmean(printed.rows["ece"]["TENT"].values()))
    assert rows["bn"][2].text == "27.5"
    assert rows["bn"][5].value == ""  # no steps, no oracle
    assert sum(width for _, width in table.spans) == len(table.headings) == len(table.rows[0])


def test_columns_without_any_number_are_left_out(results: Results) -> None:
    ablation = read_paper(PAPER)["ablation-cifar10"]
    names = dict(ablation.names) | {"ttvd": "CIPD"}
    table = paper_table(results, Printed(names, {}, ablation.rows, ablation.averages))
    assert [title.text for title in table.full_headings()] == [
        *("method", "in the paper", "paper", "grid-best", "validation", "oracle", "batch ECE", "stream ECE")
    ]


def test_its_rows_follow_ours(results: Results, printed: Printed) -> None:
    columns = results.columns
    table = add_paper_rows(domain_table(results, columns, ERROR, ""), results, columns, ERROR, printed)
    titles = [row[0].text for row in table.rows]
    place = titles.index("paper: TENT")
    assert (titles[place - 1], table.rows[place - 1][1].text) == ("tent", "grid-best of 2")
    assert [cell.text for cell in table.rows[place][2:]] == [
        "32.5",
        "19.3",
        "25.9",
    ]  # gaussian noise, fog, their mean
    assert titles.index("paper: TTVD") == titles.index("paper: TENT") + 3
    batch = add_paper_rows(
        domain_table(results, columns, BATCH_ECE, ""), results, columns, BATCH_ECE, printed
    )
    assert [cell.text for cell in batch.rows[place][2:4]] == ["22.3", "14.1"]
    plain = domain_table(results, columns, ECE, "")
    assert add_paper_rows(plain, results, columns, ECE, printed) is plain  # it has no ECE over the stream


def test_a_row_that_is_too_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "paper.toml"
    path.write_text(PAPER.read_text(encoding="utf-8").replace("65.1, 59.5, ", "65.1, "), encoding="utf-8")
    with pytest.raises(ValueError, match=r"\[cifar10.error\] T3A has 14 numbers for 15 corruptions"):
        read_paper(path)
