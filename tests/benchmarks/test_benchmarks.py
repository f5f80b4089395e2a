"""The benchmarks run, at small sizes. The times that they measure are never asserted."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.clock import Run, Times, take_turns
from benchmarks.setups import NETWORKS, Mode, Network, Setup
from benchmarks.steps import Plan, estimate_seconds, measure_all, measure_cell
from benchmarks.table import Row, Table, format_row, shorten

import ttvd
from benchmarks import growth, sites, steps, suite, transactions

CPU = torch.device("cpu")
PLAN = Plan(CPU, Mode(), 0.0, ("plain", "public"), 60.0)


@pytest.mark.parametrize("name", ["source", "tent", "sar", "t3a", "ttvd", "rdumb", "ttt"])
def test_cells(name: str, tiny: Network) -> None:
    row = measure_cell(Setup(tiny, ttvd.list_methods()[name], CPU), 3, PLAN, "tiny")
    assert row.ms
    assert row.floor
    assert row.megabytes
    assert row.images == pytest.approx(3e3 / row.ms)
    assert (row.plain is None) == (name in ("rdumb", "ttt"))
    assert (row.public is None) == (name not in ("tent", "ttvd"))
    assert (row.geometry is None) == (name not in ("tent", "t3a", "ttvd"))


def test_public_code_is_left_out_where_it_fails(tiny: Network) -> None:
    assert measure_cell(Setup(tiny, ttvd.list_methods()["ttvd"], CPU), 1, PLAN, "tiny").public is None


def test_what_does_not_fit_into_memory_is_measured_apart(
    tiny: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn(runs: Mapping[str, Run], *rest: Any) -> Times:
        if len(runs) > 1 or "plain" in runs:
            raise torch.OutOfMemoryError
        return take_turns(runs, *rest)

    monkeypatch.setattr(steps, "take_turns", turn)
    row = measure_cell(Setup(tiny, ttvd.list_methods()["eta"], CPU), 3, PLAN, "tiny")
    assert row.floor
    assert row.public
    assert row.plain is None
    assert "kept" in row.note


def test_lower_precision(tiny: Network) -> None:
    plan = PLAN._replace(mode=Mode("bfloat16", channels_last=True), rivals=())
    assert measure_cell(Setup(tiny, ttvd.list_methods()["ttvd"], CPU), 2, plan, "tiny").memory
    assert plan.mode.label == "bfloat16, channels last"


def test_cells_that_cannot_be_are_named(
    tiny: Network, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(NETWORKS, "resnet26", tiny)
    table = Table("caption")
    measure_all(table, PLAN, ["bn", "note"], ["resnet26"], [2])
    measure_all(table, PLAN._replace(longest=0.0), ["bn"], ["resnet26"], [2])
    table.close()
    out = capsys.readouterr().out
    assert [row.name for row in table.rows] == ["bn"]
    assert "note on resnet26, batch 2: note needs instance-aware norm." in out
    assert "--longest" in out


def test_estimates_grow_with_the_work() -> None:
    network, known = NETWORKS["resnet26"], ttvd.list_methods()
    one = estimate_seconds(network, known["bn"], 1)
    assert estimate_seconds(network, known["bn"], 4) == pytest.approx(4 * one)
    assert estimate_seconds(network, known["tent"], 1) == pytest.approx(2 * one)
    assert estimate_seconds(network, known["shot"], 1) == pytest.approx(3 * one)
    assert estimate_seconds(network, known["ttvd"], 1) == pytest.approx(8 * one)


def test_growth() -> None:
    rows = [
        *growth.measure_classes(CPU, 8, 0.0, classes=(2, 4)),
        *growth.measure_sites(CPU, 8, 0.0, counts=(1, 2), classes=3),
        *growth.measure_stream(CPU, lengths=(2, 6)),
    ]
    assert len(rows) == 4 + 2 + 6
    assert all(row.ms for row in rows)
    notes = [row.note for row in rows if row.group == "stream"]
    assert all(note.endswith(" bytes since the first batches") for note in notes)
    # What earlier tests have left behind may be freed meanwhile.
    assert all(int(note.split()[0].replace(",", "")) <= 0 for note in notes)


def test_sites(tiny: Network) -> None:
    row = sites.measure_sites(tiny, CPU, images=6, views=4, batch=3, seconds=0.0)
    assert row.floor
    assert "of a bare forward pass" in row.note


def test_numbers_are_short() -> None:
    assert [shorten(v) for v in (0.0, 0.01234, 9.999, 12.345, 999.9, 123456.0)] == [
        "0", "0.0123", "10.00", "12.3", "1,000", "123,000",
    ]  # fmt: skip


def test_tables_print_and_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("caption")
    table.extend([Row("one", "a", "batch 1", ms=1.5, geometry=0.025), Row("one", "b", floor=1.04, note="so")])
    table.note("twice")
    table.note("twice")
    table.close(tmp_path / "new" / "rows.csv")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "caption"
    assert lines.count("one") == 1
    assert lines.count("twice") == 1
    assert "2.5%" in format_row(table.rows[0])
    with (tmp_path / "new" / "rows.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [row["name"] for row in found] == ["a", "b"]
    assert found[0]["ms"] == "1.5"
    assert found[1]["ms"] == ""


def test_the_suite_ends_when_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    def rows() -> Iterator[Row]:
        yield Row("g", "first")

    def fail() -> list[Row]:
        raise ImportError("no such package")

    table = Table("caption")
    suite.run_suite([suite.Piece("one", rows), suite.Piece("two", fail)], table, minutes=1.0)
    suite.run_suite([suite.Piece("late", rows)], table, minutes=0.0)
    table.close()
    out = capsys.readouterr().out
    assert len(table.rows) == 1
    assert "Left out: two (no such package)." in out
    assert "were over: late." in out
    pieces = list(suite.list_pieces(0.0, 2))
    assert len({piece.name for piece in pieces}) == len(pieces)


def test_arguments_have_defaults() -> None:
    args = steps.parse_arguments(["--batches", "2"])
    assert set(args.methods) == set(ttvd.list_methods())
    assert growth.parse_arguments([]).dim > 0
    assert sites.parse_arguments([]).images % sites.parse_arguments([]).batch == 0
    assert replace(Row("g", "n"), ms=1.0).ms == 1.0


@pytest.mark.parametrize("name", ["tent", "ttvd", "t3a"])
def test_transactions(name: str, tiny: Network) -> None:
    """A step without protection learns the same, and one after it is protected again."""
    setup = Setup(tiny, ttvd.list_methods()[name], CPU)
    milliseconds, ratio = transactions.measure(setup, 3, Mode(), 0.0)
    assert milliseconds > 0
    assert ratio > 0
    adapter, bare, x = setup.adapter(Mode()), setup.adapter(Mode()), setup.batch(3)
    with transactions.unprotected():
        bare(x)
    adapter(x)
    theirs = bare.snapshot()
    theirs |= {key: tensor for key, tensor in adapter.snapshot().items() if key.startswith("guard.")}
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in adapter.snapshot().items())
    theirs = bare.snapshot()
    layer = next(part for part in bare.modules() if isinstance(part, torch.nn.Conv2d))
    handle = layer.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bare(x)
    handle.remove()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in bare.snapshot().items())
