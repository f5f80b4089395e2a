"""Downloads from a server on this machine: resumed, checked, unpacked with care, and explained when they fail."""

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.data import CLOSED, FileServer, make_zip, serve
from ttvd.data import download
from ttvd.data.catalog import PUBLISHED, Download, PublishedSet, find_published
from ttvd.data.corruptions import EVERY
from ttvd.data.download import TransferError, download_file, download_set
from ttvd.data.sets import SETS, load_set

CONTENT = np.random.default_rng(0).bytes(300_000)
MD5 = hashlib.md5(CONTENT).hexdigest()
FILE = "/data.bin"


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serve({FILE: CONTENT}) as running:
        yield running


def test_a_file_arrives_whole_and_its_progress_is_told(server: FileServer, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    target = tmp_path / "below" / "data.bin"
    download_file([server.url(FILE)], target, MD5, progress=lambda *step: seen.append(step))
    assert target.read_bytes() == CONTENT
    assert seen[-1] == ("data.bin", len(CONTENT), len(CONTENT))
    assert [path.name for path in target.parent.iterdir()] == ["data.bin"]
    server.files.clear()
    assert download_file([server.url(FILE)], target, MD5) == target  # it is there: no request
    assert len(server.requests) == 1


def test_an_interrupted_transfer_goes_on_where_it_stopped(server: FileServer, tmp_path: Path) -> None:
    server.break_after = 120_000
    download_file([server.url(FILE)], tmp_path / "data.bin", MD5)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    assert server.requests == [None, "bytes=120000-", "bytes=240000-"]


def test_a_part_of_an_earlier_run_is_continued(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "data.bin.part").write_bytes(CONTENT[:1000])
    download_file([server.url(FILE)], tmp_path / "data.bin", MD5)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    assert server.requests == ["bytes=1000-"]


def test_temporary_files_of_a_killed_run_are_removed(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / ".download-data.bin").mkdir()
    (tmp_path / ".download-data.bin" / "tmp123").touch()
    download_file([server.url(FILE)], tmp_path / "data.bin", MD5)
    assert [path.name for path in tmp_path.iterdir()] == ["data.bin"]


def test_a_server_without_ranges_sends_everything_again(server: FileServer, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "data.bin.part").write_bytes(CONTENT[:1000])
    download_file([server.url(FILE)], tmp_path / "data.bin", MD5)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


def test_a_whole_part_is_used_without_more_bytes(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "data.bin.part").write_bytes(CONTENT)
    download_file([server.url(FILE)], tmp_path / "data.bin", MD5)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    assert server.requests == [f"bytes={len(CONTENT)}-"]


@pytest.mark.parametrize("length", [1000, len(CONTENT) + 5])
def test_a_part_of_another_file_is_thrown_away(length: int, server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "data.bin.part").write_bytes(bytes(length))
    download_file([server.url(FILE)], tmp_path / "data.bin", MD5)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


def test_a_server_that_sends_nothing_is_given_up(server: FileServer, tmp_path: Path) -> None:
    server.break_after = 0
    with pytest.raises(TransferError, match="broke off 5 times"):
        download_file([server.url(FILE)], tmp_path / "data.bin", MD5)
    assert not (tmp_path / "data.bin").exists()


def test_a_wrong_checksum_leaves_nothing(server: FileServer, tmp_path: Path) -> None:
    server.files["/data.bin"] = b"<html>Too many requests</html>"
    with pytest.raises(TransferError, match="web page"):
        download_file([server.url(FILE)], tmp_path / "data.bin", MD5)
    assert list(tmp_path.iterdir()) == []


def test_mirrors_are_tried_in_order(server: FileServer, tmp_path: Path) -> None:
    server.files["/bad.bin"] = CONTENT[::-1]
    urls = [server.url("/missing.bin"), server.url("/bad.bin"), server.url(FILE)]
    download_file(urls, tmp_path / "data.bin", MD5)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    with pytest.raises(TransferError, match=rf"missing\.bin: HTTP Error 404.*bad\.bin: MD5.*{MD5}"):
        download_file(urls[:2], tmp_path / "other.bin", MD5)


def test_a_damaged_file_put_there_by_hand_is_refused(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(CONTENT[:-1])
    with pytest.raises(ValueError, match="delete it and try again"):
        download_file([server.url(FILE)], tmp_path / "data.bin", MD5)
    assert server.requests == []


@pytest.fixture
def toy(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> PublishedSet:
    """A set `toy` with an archive of one folder."""
    content = make_zip({"toy/a.npy": b"one", "toy/b.npy": b"two", "toy/run.sh": b"no"})
    server.files["/toy.zip"] = content
    item = Download("toy.zip", (server.url("/toy.zip"),), hashlib.md5(content).hexdigest(), ("toy/*.npy",))
    published = PublishedSet("toy", "https://example.org/toy", "1 kB", (item,))
    monkeypatch.setitem(PUBLISHED, "toy", published)
    return published


def test_a_set_is_fetched_once_and_laid_out(toy: PublishedSet, server: FileServer, tmp_path: Path) -> None:
    folder = download_set("toy", tmp_path)
    assert {path.name: path.read_bytes() for path in folder.glob("[!.]*")} == {
        "a.npy": b"one",
        "b.npy": b"two",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]
    download_set("toy", tmp_path)
    assert len(server.requests) == 1


def test_an_archive_put_there_by_hand_needs_no_network(
    toy: PublishedSet, server: FileServer, tmp_path: Path
) -> None:
    (tmp_path / "toy.zip").write_bytes(server.files["/toy.zip"])
    (tmp_path / ".unpacking-toy.zip").mkdir()  # left by a killed run
    (tmp_path / ".unpacking-toy.zip" / "half.npy").write_bytes(b"h")
    assert sorted(path.name for path in download_set("toy", tmp_path).glob("[!.]*")) == ["a.npy", "b.npy"]
    assert server.requests == []


def test_without_a_network_it_says_what_to_put_where(
    toy: PublishedSet, server: FileServer, tmp_path: Path
) -> None:
    server.files.clear()
    expected = rf"download toy\.zip \(https://example\.org/toy\), put it into {re.escape(str(tmp_path))}"
    with pytest.raises(TransferError, match=expected):
        download_set("toy", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_archive_without_the_set_leaves_nothing(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = make_zip({"toy/readme": b"hello"})
    server.files["/toy.zip"] = content
    item = Download("toy.zip", (server.url("/toy.zip"),), hashlib.md5(content).hexdigest(), ("toy/*.npy",))
    monkeypatch.setitem(PUBLISHED, "toy", PublishedSet("toy", "page", "1 kB", (item,)))
    with pytest.raises(ValueError, match="none of the expected files"):
        download_set("toy", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["toy.zip"]


def test_missing_pooch_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ModuleNotFoundError, match=r"ttvd\[data\]"):
        download_file([CLOSED], tmp_path / "data.bin", MD5)
    assert list(tmp_path.iterdir()) == []


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'cifar10'"):
        find_published("cifar-10")
    with pytest.raises(ValueError, match=r"register at https://image-net\.org"):
        find_published("imagenet")


def test_the_catalog_is_whole() -> None:
    corruptions = [product for item in PUBLISHED["imagenet-c"].downloads for product in item.products]
    assert sorted(corruptions) == sorted(EVERY)
    for published in PUBLISHED.values():
        for item in published.downloads:
            assert re.fullmatch("[0-9a-f]{32}", item.md5)
            assert item.urls
            assert all(item.file in url for url in item.urls)


def test_nothing_is_fetched_by_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "download_set", lambda *_, **__: pytest.fail("a set was fetched unasked"))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    for name in sorted(set(SETS) & set(PUBLISHED)):
        with pytest.raises((OSError, ValueError)):
            load_set(name, tmp_path, corruption="fog" if name.endswith("-c") else None)
