"""The examples run, on few images, and print what they promise."""

import re
import runpy
from pathlib import Path

import pytest
from torch import Tensor

import ttvd.data
from ttvd.methods import registry

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, ...]:
    return ttvd.data.split_digits()


@pytest.fixture(autouse=True)
def few_images(digits: tuple[Tensor, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example sees 1,000 digits to train on and 320 to adapt to, and writes into a folder of its own."""
    few = tuple(tensor[:count] for tensor, count in zip(digits, (1000, 1000, 320, 320), strict=True))
    monkeypatch.setattr(ttvd.data, "split_digits", lambda: few)
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))  # an example registers a method
    monkeypatch.chdir(tmp_path)


def run(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def read_errors(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.]+) %", text)]


def test_own_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before, after = read_errors(run("own_model", capsys))
    assert after < before
    assert list(tmp_path.iterdir())


def test_timm_model(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("timm")
    assert len(read_errors(run("timm_model", capsys))) == 4


def test_huggingface_model(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert "(50, 5)" in run("huggingface_model", capsys)


def test_own_method(capsys: pytest.CaptureFixture[str]) -> None:
    out = run("own_method", capsys)
    assert "reset" in out
    assert "(16, 10)" in out


def test_finetune_label_augmentation(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(read_errors(run("finetune_label_augmentation", capsys))) == 2


def test_every_example_is_tested() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested
