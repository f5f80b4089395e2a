"""The paper's numbers: copied whole, compared by the same rules, with its slips named."""

from pathlib import Path
from statistics import fmean
from typing import cast

import pytest

import ttvd
from tests.report.fakes import FakeStore
from ttvd.bench.store import Store
from ttvd.bench.study import study
from ttvd.report.paper import Printed, beside_table, mix_in, read_paper
from ttvd.report.results import BATCH_ECE, ECE, ERROR, Results
from ttvd.report.tables import column_table

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
    table = beside_table(results, printed)
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
    table = beside_table(results, Printed(names, {}, ablation.rows, ablation.averages))
    assert [title.text for title in table.titles()] == [
        *("method", "in the paper", "paper", "grid-best", "validation", "oracle", "batch ECE", "stream ECE")
    ]


def test_its_rows_follow_ours(results: Results, printed: Printed) -> None:
    columns = results.columns
    table = mix_in(column_table(results, columns, ERROR, ""), results, columns, ERROR, printed)
    titles = [row[0].text for row in table.rows]
    place = titles.index("paper: TENT")
    assert (titles[place - 1], table.rows[place - 1][1].text) == ("tent", "grid-best of 2")
    assert [cell.text for cell in table.rows[place][2:]] == [
        "32.5",
        "19.3",
        "25.9",
    ]  # gaussian noise, fog, their mean
    assert titles.index("paper: TTVD") == titles.index("paper: TENT") + 3
    batch = mix_in(column_table(results, columns, BATCH_ECE, ""), results, columns, BATCH_ECE, printed)
    assert [cell.text for cell in batch.rows[place][2:4]] == ["22.3", "14.1"]
    plain = column_table(results, columns, ECE, "")
    assert mix_in(plain, results, columns, ECE, printed) is plain  # it has no ECE over the stream


def test_a_row_that_is_too_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "paper.toml"
    path.write_text(PAPER.read_text(encoding="utf-8").replace("65.1, 59.5, ", "65.1, "), encoding="utf-8")
    with pytest.raises(ValueError, match=r"\[cifar10.error\] T3A has 14 numbers for 15 corruptions"):
        read_paper(path)
