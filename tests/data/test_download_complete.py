"""Which sets count as complete, and what is said about the others."""

import hashlib
import io
import re
import tarfile
from pathlib import Path

import pytest

from ttvd.data.download import (
    MARKER,
    SOURCES,
    Download,
    Source,
    TransferError,
    complete,
    contents,
    fetch_set,
    find_fault,
    is_complete,
)

CLOSED = "http://127.0.0.1:9/gone"  # nobody listens on the port of "discard"


def make_tar(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


ARCHIVE = make_tar({"toy/a.npy": b"one", "toy/b.bin": b"two"})
TOY = Download("toy.tar", (CLOSED,), hashlib.md5(ARCHIVE).hexdigest(), ("toy/*",), ("toy",))


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "toy", Source("toy", "https://example.org/toy", "1 kB", (TOY,)))


@pytest.fixture
def fetched(tmp_path: Path) -> Path:
    (tmp_path / "toy.tar").write_bytes(ARCHIVE)
    return fetch_set("toy", tmp_path)


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_folders_and_files_without_content_are_not_complete(name: str, tmp_path: Path) -> None:
    source = SOURCES[name]
    for item in source.downloads:
        for product in item.products:
            place = tmp_path / source.home / product
            place.parent.mkdir(parents=True, exist_ok=True)
            if item.members:
                place.mkdir()
            else:
                place.write_bytes(b"garbage")
    assert not any(is_complete(item, tmp_path / source.home) for item in source.downloads)


def test_a_fetched_folder_is_complete_until_a_file_is_lost_or_cut(fetched: Path) -> None:
    assert (fetched / MARKER).is_file()
    assert is_complete(TOY, fetched.parent)
    (fetched / "b.bin").write_bytes(b"t")
    assert find_fault(TOY, "toy", fetched.parent) == "b.bin has 1 bytes, expected 3"
    (fetched / "b.bin").unlink()
    assert find_fault(TOY, "toy", fetched.parent) == "b.bin is missing"


def test_the_marker_of_another_archive_does_not_count(fetched: Path) -> None:
    (fetched / MARKER).write_text((fetched / MARKER).read_text().replace(TOY.md5, "0" * 32))
    assert not is_complete(TOY, fetched.parent)
    (fetched / MARKER).write_text("{")
    assert not is_complete(TOY, fetched.parent)


def test_markers_do_not_list_many_files(fetched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complete, "_MOST_LISTED", 1)
    complete.write_marker(TOY, fetched)
    assert "a.npy" not in (fetched / MARKER).read_text()
    assert is_complete(TOY, fetched.parent)


def test_a_folder_that_came_another_way_is_known_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(contents.SIZES, "toy", {"a.npy": 3, "b.bin": 3})
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "a.npy").write_bytes(b"header and one")  # headers have no fixed length
    assert find_fault(TOY, "toy", tmp_path) == "b.bin is missing"
    (tmp_path / "toy" / "b.bin").write_bytes(b"twoo")
    assert find_fault(TOY, "toy", tmp_path) == "b.bin has 4 bytes, expected 3"
    (tmp_path / "toy" / "b.bin").write_bytes(b"two")
    assert is_complete(TOY, tmp_path)


def test_pictures_that_came_another_way_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contents.COUNTS, "toy", {"n*/*.jpg": 2})
    (tmp_path / "toy" / "n01").mkdir(parents=True)
    (tmp_path / "toy" / "n01" / "a.jpg").touch()
    assert find_fault(TOY, "toy", tmp_path) == "there are 1 pictures n*/*.jpg, expected 2"
    (tmp_path / "toy" / "n01" / "b.jpg").touch()
    assert is_complete(TOY, tmp_path)


def test_every_archive_has_known_contents() -> None:
    items = [item for source in SOURCES.values() for item in source.downloads if item is not TOY]
    made = {product for item in items for product in item.makes}
    assert made == set(contents.SIZES) | set(contents.COUNTS)


def test_an_archive_is_used_although_an_empty_folder_is_there(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy.tar").write_bytes(ARCHIVE)
    assert (fetch_set("toy", tmp_path) / "a.npy").read_bytes() == b"one"


def test_an_incomplete_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "mine.txt").write_text("mine")
    (tmp_path / "toy.tar").write_bytes(ARCHIVE)
    with pytest.raises(ValueError, match=r"is not the whole set.*delete it or move it away"):
        fetch_set("toy", tmp_path)
    assert [path.name for path in (tmp_path / "toy").iterdir()] == ["mine.txt"]
    assert (tmp_path / "toy.tar").is_file()


def test_a_damaged_archive_put_there_by_hand_is_refused(tmp_path: Path) -> None:
    (tmp_path / "toy.tar").write_bytes(ARCHIVE[:-1])
    with pytest.raises(ValueError, match=f"expected {TOY.md5}"):
        fetch_set("toy", tmp_path)
    assert not (tmp_path / "toy").exists()


def test_garbage_under_the_name_of_a_plain_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(b"<html>")
    with pytest.raises(ValueError, match="it is a web page; delete it"):
        fetch_set("mnist", tmp_path)


@pytest.mark.parametrize("name", ["mnist", "imagenet-c"])
def test_without_a_network_all_missing_files_are_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SOURCES[name]
    items = [Download(item.file, (CLOSED,), item.md5, item.members, item.makes) for item in source.downloads]
    monkeypatch.setitem(SOURCES, name, Source(name, "page", "size", tuple(items), source.home))
    names = re.escape(", ".join(item.file for item in items))
    with pytest.raises(TransferError, match=rf"download {names} \(page\), put them into"):
        fetch_set(name, tmp_path)


def test_files_put_there_by_hand_are_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    md5 = hashlib.md5(b"here").hexdigest()
    items = tuple(Download(file, (CLOSED,), md5) for file in ("a.gz", "b.gz", "c.gz"))
    monkeypatch.setitem(SOURCES, "toy", Source("toy", "page", "size", items))
    (tmp_path / "b.gz").write_bytes(b"here")
    with pytest.raises(TransferError, match=r"download a\.gz, c\.gz \(page\)"):
        fetch_set("toy", tmp_path)
