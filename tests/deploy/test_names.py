"""Names of files as the system allows them: they come out whole, in one row each, and never as a formula."""

import csv
import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers.cli import check_cli, refuse_cli
from tests.helpers.deploy import make_adapter, make_inputs, read_rows
from ttvd.deploy import adapt_stream
from ttvd.files import escape_cell, unescape_cell

ODD = [
    "=cmd|' /C calc'!A0", "+1+1", "-1+1", "@SUM(A1)", "a;=1+1", "\t=1", "\r=1", "-1", "\uff1d1",
    "two\nlines", "car\rriage", 'a "quoted", name', "back\\slash", r"\x41", "esc\x1b[31m", "nel\x85", "ls\u2028",
    "[/b]", "[red]", ":smile:", "ü", "日本", " space ", "\udcff", "a\udc80b\udcfe", "é\udce9", "'",
]  # fmt: skip


def test_cells_are_lossless_and_harmless() -> None:
    rng = random.Random(0)
    letters = "ab=+-@;\\x0'\",\t\r\n\x00\x7f\x85\u2028ü\udc80\udcff"
    texts = [*ODD, *("".join(rng.choices(letters, k=rng.randrange(8))) for _ in range(2000))]
    # Bytes that are UTF-8 together are never escaped one by one in the name of a file.
    texts = [os.fsdecode(os.fsencode(text)) for text in texts]
    cells = [escape_cell(text) for text in texts]
    assert [unescape_cell(cell) for cell in cells] == texts
    assert all(len(cell.splitlines()) <= 1 and cell.isprintable() for cell in cells)
    assert not any(part[:1] in ("=", "@", "\uff1d") for cell in cells for part in cell.split(";"))
    assert escape_cell("-0.5") == "-0.5"
    assert escape_cell("-1.png") == r"\x2d1.png"


def test_half_of_a_pair_is_written(tmp_path: Path) -> None:
    """No file has such a name, but a library user may pass it."""
    inputs = replace(make_inputs(1), names=["\ud800"])
    for suffix in (".csv", ".parquet"):
        adapt_stream(make_adapter(), inputs, out=tmp_path / f"out{suffix}")
    assert read_rows(tmp_path / "out.csv")[0]["name"] == r"\xed\xa0\x80"


def test_names_and_classes_in_both_formats(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    inputs = replace(make_inputs(len(ODD)), names=ODD)
    classes = ["=a", "-1", "two\nlines"]
    for suffix in (".csv", ".parquet"):
        adapt_stream(make_adapter(), inputs, out=tmp_path / f"out{suffix}", classes=classes)
    content = (tmp_path / "out.csv").read_bytes()
    assert content.count(b"\n") == len(ODD) + 1
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [unescape_cell(row["name"]) for row in rows] == ODD
    words = [unescape_cell(row["class"]) for row in rows]
    assert words == [classes[int(row["prediction"])] for row in rows]
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["name", "prediction", "confidence", "class", "name_bytes"]
    assert table["class"].to_pylist() == words
    for name, shown, content in zip(
        ODD, table["name"].to_pylist(), table["name_bytes"].to_pylist(), strict=True
    ):
        is_utf8 = not any("\udc80" <= letter <= "\udcff" for letter in name)
        assert (shown, content) == ((name, None) if is_utf8 else (escape_cell(name), os.fsencode(name)))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_files_with_odd_names_from_the_command_line(tmp_path: Path) -> None:
    names = [name.replace("/", "") + ".png" for name in ODD]
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    Image.new("L", (28, 28)).save(tmp_path / "one.png")
    for name in names:
        (pictures / name).write_bytes((tmp_path / "one.png").read_bytes())
    (pictures / "bad[b]\x1b\udcff.png").write_bytes(b"no image")
    out = tmp_path / "out\udcfe.csv"
    options = ("--model", "digits-plain", "--method", "bn", "--gray")
    command = ("adapt", os.fspath(pictures), *options, "--out", os.fspath(out))
    assert "bad" in refuse_cli(*command)
    output = check_cli(*command, "--unreadable", "skip")
    assert r"bad[b]\x1b\xff.png" in output
    assert sorted(unescape_cell(row["name"]) for row in read_rows(out)) == sorted(names)
