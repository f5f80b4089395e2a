"""The tool that trains small classifiers and measures them on every stream, end to end on a few digits."""

import sys

import pytest
import torch
from tools import measure_fashion as tool

import ttvd
from ttvd.data import split_digits
from ttvd.data.sets import ImageSet


def test_the_table_has_every_stream(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images, labels, new_images, new_labels = split_digits()
    sets = {
        "train": ImageSet((255 * images).round().byte(), labels),
        "test": ImageSet((255 * new_images).round().byte(), new_labels),
    }
    monkeypatch.setattr(tool, "load_set", lambda _, __, split: sets[split])
    monkeypatch.setattr(tool, "CORRUPTIONS", {"contrast": 3})
    for name, value in {"TRAINING": 1280, "IMAGES": 320, "SITES": 1000, "PART": 64, "CLEAN": 128}.items():
        monkeypatch.setattr(tool, name, value)
    monkeypatch.setattr(tool, "SHIFTED", 128)
    monkeypatch.setattr(sys, "argv", ["measure_fashion.py", "--methods", "source", "bn"])
    tool.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in lines}
    kinds = ("shuffled", "sorted", "dirichlet", "batches of 8", "one by one")
    assert set(cells) == {"stream", *kinds, *(f"{kind}, clean" for kind in kinds), "onset", "first", "back"}
    assert cells["stream"] == ["source", "bn |"]
    source, bn = (float(text.split(" / ")[0]) for text in cells["shuffled"])
    assert source > bn + 10, "batch norm undoes the loss of contrast"
    assert float(cells["shuffled, clean"][0].split(" / ")[0]) < 40
    assert cells["first"][0].count("/") == 0


def test_a_measurement_is_that_of_its_parts() -> None:
    """An onset is split where the images change; the answers are those of the source."""
    images, labels = (
        torch.zeros(tool.CLEAN + tool.SHIFTED + 128, 1, 4, 4),
        torch.zeros(1280, dtype=torch.int64),
    )
    images[tool.CLEAN : tool.CLEAN + 64] = 1.0
    head = torch.nn.Linear(16, 2)
    net = torch.nn.Sequential(torch.nn.Flatten(), head).eval()
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.0], [1.0]]).expand(2, 16))
        head.bias.copy_(torch.tensor([1.0, 0.0]))
    found = tool.measure(ttvd.create("source", net), ("onset", images, labels, 64))
    assert found["first"][0] == 50.0
    assert found["back"][0] == 0.0
    assert found["onset"][0] == pytest.approx(100 * 64 / 1280)


@pytest.mark.parametrize("name", tool.NETWORKS)
def test_networks_classify_grey_images_of_28_pixels(name: str) -> None:
    model, epochs = tool.make_network(name)
    assert model(torch.rand(2, 1, 28, 28)).shape == (2, 10)
    assert epochs > 0
