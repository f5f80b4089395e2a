"""The benchmark of pictures from the disk runs, at a small size, and tells waiting from working."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.inputs import HEIGHT, ONE_BY_ONE, WIDTH, list_ways, make_pictures, measure_inputs, use
from PIL import Image
from torch import Tensor

from benchmarks import inputs
from ttvd.data.sets import ImageFolder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ImageFolder:
    return make_pictures(tmp_path_factory.mktemp("inputs"), 5)


def test_pictures_are_like_photographs(folder: ImageFolder) -> None:
    path = folder.root / folder.path(0)
    with Image.open(path) as picture:
        assert picture.size == (WIDTH, HEIGHT)
    assert 40_000 < path.stat().st_size < 200_000


def test_all_ways_load_the_same(folder: ImageFolder) -> None:
    ways = {name: list(load()) for name, load in list_ways(folder, 2, (1, 2), CPU).items()}
    assert list(ways) == [ONE_BY_ONE, "1 thread ahead", "2 threads ahead"]
    for batches in ways.values():
        assert [len(images) for images in batches] == [2, 2, 1]
        assert torch.equal(torch.cat(batches), folder.floats())


def test_waiting_is_told_from_working() -> None:
    def load() -> Iterator[Tensor]:
        for _ in range(3):
            time.sleep(0.02)
            yield torch.zeros(1)

    total, first, waited = use(load(), 0.01, CPU)
    assert first >= 0.02
    assert waited >= 0.04
    assert total - first - waited >= 0.03


def test_rows(folder: ImageFolder) -> None:
    quick, slow = (list(measure_inputs(folder, 2, (2,), step, CPU, 1)) for step in (0.0, 0.001))
    for row in (*quick, *slow):
        assert row.ms
        assert row.images == pytest.approx(2e3 / row.ms)
    assert quick[0].note == "1.00 x one by one"
    assert "of the time" in slow[1].note


def test_the_whole_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--pictures 2 --batch 1 --workers 1 --steps 0 1 --rounds 1 --out"
    monkeypatch.setattr("sys.argv", ["inputs", *options.split(), str(tmp_path / "rows.csv")])
    inputs.main()
    assert "1 thread ahead" in capsys.readouterr().out
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 5
