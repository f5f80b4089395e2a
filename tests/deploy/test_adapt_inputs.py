"""What `ttvd adapt` says about its inputs: pictures that cannot be used, and what was left out."""

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.helpers.cli import check_cli, refuse_cli
from tests.helpers.deploy import read_rows


def command(source: Path, out: Path, *options: object) -> tuple[object, ...]:
    model = ("--model", "digits-plain", "--method", "bn", "--gray")
    return ("adapt", source, *model, "--out", out, *options)


def write_digits(digits: Path, folder: Path, count: int = 8, **options: Any) -> None:
    folder.mkdir()
    for number, image in enumerate(np.load(digits / "digits.npy")[:count]):
        Image.fromarray(image).save(folder / f"{number}.png", **options)


def test_pictures_with_too_many_pixels_are_unreadable(digits: Path, tmp_path: Path) -> None:
    write_digits(digits, tmp_path / "in")
    Image.new("1", (13_000, 13_000)).save(tmp_path / "in" / "3.png")  # 21 kB
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        message = refuse_cli(*command(tmp_path / "in", tmp_path / "a.csv", "--size", 28))
        assert "3.png" in message
        assert "13,000 x 13,000 pixels, more than the limit of 67,108,864" in message
        output = check_cli(
            *command(tmp_path / "in", tmp_path / "a.csv", "--size", 28, "--unreadable", "skip")
        )
    assert not [warning for warning in caught if "PIL" in warning.filename]
    assert "7 predictions" in output
    assert "1 images left out" in output
    assert [row["name"] for row in read_rows(tmp_path / "a.csv")] == [
        f"{i}.png" for i in (0, 1, 2, 4, 5, 6, 7)
    ]
    assert "more than the limit of 783" in refuse_cli(
        *command(tmp_path / "in", tmp_path / "b.csv", "--max-pixels", 28 * 28 - 1)
    )


def test_what_is_left_out_is_counted_and_named(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_digits(digits, tmp_path / "in")
    for name in ("a.gif", "b.gif", "README"):
        (tmp_path / "in" / name).touch()
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "private").mkdir()
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("private"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr("os.scandir", refuse)
    assert "private" in refuse_cli(*command(tmp_path / "in", tmp_path / "a.csv"))
    output = check_cli(*command(tmp_path / "in", tmp_path / "a.csv", "--unreadable", "skip"))
    left_out = ("2 .gif (a.gif, b.gif)", "1 without a suffix (README)", "1 listed elsewhere (loop)")
    for part in (*left_out, "1 unreadable (private: Permission denied)"):
        assert part in output
    assert len(read_rows(tmp_path / "a.csv")) == 8


def test_the_orientation_is_applied_and_belongs_to_the_stream(digits: Path, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    write_digits(digits, tmp_path / "plain")
    write_digits(digits, tmp_path / "turned", exif=exif)
    (tmp_path / "upside").mkdir()
    for number in range(8):
        upside = Image.open(tmp_path / "plain" / f"{number}.png").rotate(180)
        upside.save(tmp_path / "upside" / f"{number}.png")
    found = {}
    for name, options in {
        "plain": (),
        "upside": (),
        "turned": (),
        "ignored": ("--ignore-orientation",),
    }.items():
        source, out = tmp_path / name.replace("ignored", "turned"), tmp_path / f"{name}.csv"
        check_cli(*command(source, out, "--save-state", tmp_path / f"{name}.state", *options))
        found[name] = [row["confidence"] for row in read_rows(out)]
    assert found["turned"] == found["upside"]
    assert found["ignored"] == found["plain"]
    assert found["turned"] != found["plain"]
    resumed = ("--save-state", tmp_path / "turned.state", "--resume", "--ignore-orientation")
    assert "orientation ignored" in refuse_cli(
        *command(tmp_path / "turned", tmp_path / "turned.csv", *resumed)
    )
