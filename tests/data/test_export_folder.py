"""Exports and what lies in their folder already: the user's files, another run, the rests of a killed one."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.helpers.data import make_set, read_files
from ttvd.data.export import LOCK, ExportSettings, export_set, lock_folder
from ttvd.data.sets import ImageFolder, ImageSet

SETTINGS = ExportSettings(("contrast",), (5,))


@pytest.fixture
def clean() -> ImageSet:
    return make_set(4, ("ant", "bee", "cow"))


@pytest.mark.parametrize(
    "name", ["contrast.npy", "labels.npy", "SHA256SUMS", ".notes.tmp", ".a.npy.12.tmp", "x/y"]
)
@pytest.mark.parametrize("layout", ["cifar", "folder"])
def test_a_folder_with_other_files_is_refused(
    name: str, layout: Any, clean: ImageSet, tmp_path: Path
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"is not empty .* choose a new or an empty folder"):
        export_set(clean, tmp_path, SETTINGS, layout=layout)
    assert read_files(tmp_path) == {name: b"mine"}


def test_another_programs_manifest_is_refused(clean: ImageSet, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    with pytest.raises(ValueError, match="not of an export"):
        export_set(clean, tmp_path, SETTINGS)
    assert read_files(tmp_path) == {"manifest.json": b'{"name": "a web page"}'}


def test_a_run_killed_at_its_very_beginning_can_be_repeated(clean: ImageSet, tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    (tmp_path / ".manifest.json.123.tmp").write_text("{")
    export_set(clean, tmp_path, SETTINGS)
    assert sorted(read_files(tmp_path)) == ["SHA256SUMS", "contrast.npy", "labels.npy", "manifest.json"]


@pytest.mark.parametrize("layout", ["cifar", "folder"])
def test_only_temporaries_of_the_export_are_removed(layout: Any, clean: ImageSet, tmp_path: Path) -> None:
    export_set(clean, tmp_path, SETTINGS, layout=layout, image_format="png")
    whole = read_files(tmp_path)
    stray = {"cifar": ".contrast.npy.77.tmp", "folder": "contrast/5/ant/.0.png.77.tmp"}[layout]
    kept = {".notes.tmp": b"mine", ".todo.npy.1.tmp": b"mine", "contrast/5/.x.png.1.tmp": b"mine"}
    for name, content in {stray: b"half", ".SHA256SUMS.77.tmp": b"half", **kept}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    export_set(clean, tmp_path, SETTINGS, layout=layout, image_format="png")
    assert read_files(tmp_path) == {**whole, **kept}


HOLD = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def hold_elsewhere(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(folder / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_run_is_refused_and_leaves_the_first_alone(clean: ImageSet, tmp_path: Path) -> None:
    with hold_elsewhere(tmp_path) as process:
        (tmp_path / ".contrast.npy.77.tmp").write_bytes(b"being written")
        before = read_files(tmp_path)
        with pytest.raises(BlockingIOError, match="another run is writing to"):
            export_set(clean, tmp_path, SETTINGS)
        assert read_files(tmp_path) == before
        (tmp_path / ".contrast.npy.77.tmp").unlink()
        process.kill()
        process.wait(10)
        assert (tmp_path / LOCK).exists()
        export_set(clean, tmp_path, SETTINGS)  # a killed run blocks nobody
    assert not (tmp_path / LOCK).exists()


def test_the_lock_is_given_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), lock_folder(tmp_path):
        raise KeyError
    with lock_folder(tmp_path), pytest.raises(BlockingIOError), lock_folder(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", [".", "deeper"])
def test_a_file_in_place_of_the_folder_is_refused(below: str, clean: ImageSet, tmp_path: Path) -> None:
    (tmp_path / "afile").write_text("mine")
    with pytest.raises(NotADirectoryError, match="goes into a folder"):
        export_set(clean, tmp_path / "afile" / below, SETTINGS)
    assert read_files(tmp_path) == {"afile": b"mine"}


def test_missing_pillow_is_told_before_work_begins(
    clean: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in" / "cat").mkdir(parents=True)
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(tmp_path / "in" / "cat" / "0.png")
    pictures = ImageFolder(tmp_path / "in", None, None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    message = r"needs Pillow: pip install 'ttvd\[images\]'"
    for source, settings, layout in (
        (clean, ExportSettings(("contrast", "jpeg_compression"), (1,)), "cifar"),
        (clean, SETTINGS, "folder"),
        (pictures, SETTINGS, "cifar"),
    ):
        with pytest.raises(ModuleNotFoundError, match=message):
            export_set(source, tmp_path / "out", settings, layout=layout)  # type: ignore[arg-type]
    with pytest.raises(ModuleNotFoundError, match=message):
        pictures.check_size()
    assert not (tmp_path / "out").exists()
    export_set(clean, tmp_path / "out", SETTINGS)  # stacks of other corruptions need no Pillow
