"""The benchmark of table 1 on pictures that are as small as its models."""

from argparse import Namespace
from pathlib import Path

import pytest
from benchmarks.table import Table

from benchmarks import grids, table1
from tests.helpers.bench import make_resources
from tests.helpers.engines import PlainEngine
from ttvd.bench.job import execute
from ttvd.bench.resources import Resources


@pytest.fixture
def resources(tmp_path: Path) -> Resources:
    """The resources of the small setup, with its model under the name that the table asks for."""
    made = make_resources(tmp_path, count=20)
    folder = made.config.checkpoints
    assert folder is not None
    for path in folder.glob("tiny*"):
        path.rename(path.with_name(path.name.replace("tiny", table1.SLA)))
    return Resources(made.config, made.shared())


def make_arguments(resources: Resources, *more: str) -> Namespace:
    folder = str(resources.config.checkpoints)
    return table1.parse_arguments(
        ["--data", ".", "--checkpoints", folder, "--corruptions", "fog", "contrast", "--limit", "8", *more]
    )


def test_lines_of_the_table(resources: Resources, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("caption")
    args = make_arguments(resources, "--methods", "bn", "tent", "ttvd", "ttt", "SLA + bn")
    table.extend(table1.measure_table(args, table, resources))
    table.close()
    assert {row.name: row.setting for row in table.rows} == {
        "bn": "2 runs",
        "tent": "6 runs",
        "SLA + bn": "2 runs",
        "ttvd": "2 runs",
        "all of it": "12 runs",
    }
    out = capsys.readouterr().out
    assert "the plain model is missing" in out
    assert "ttt is left out: its model, resnet26-cifar10-rotation, is missing." in out


def test_a_full_run(resources: Resources) -> None:
    apart, stream = table1.measure_run(make_arguments(resources, "--precision", "bfloat16"), resources)
    assert apart.setting == "2 runs"
    assert stream.setting == "1 runs"
    assert "error" in apart.note


def test_the_grid_counts_the_time_in_runs() -> None:
    wall, busy = grids.run_once(PlainEngine(execute), runs=2, limit=32)
    assert 0 < busy < wall
