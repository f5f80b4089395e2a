"""Downloads from a server on this machine: resumed, checked, unpacked with care, and explained when they fail."""

import hashlib
import io
import re
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from ttvd.data import fetch
from ttvd.data.download import SOURCES, Download, Source, TransferError, download_file, fetch_set, find_source

CONTENT = np.random.default_rng(0).bytes(300_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


class Shop(ThreadingHTTPServer):
    """Serves files; may break off, ignore ranges or fail."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Clerk)
        self.files = {"/data.bin": CONTENT}
        self.break_after: int | None = None
        self.ranges = True
        self.requests: list[str | None] = []

    def address(self, path: str = "/data.bin") -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class Clerk(BaseHTTPRequestHandler):
    server: Shop

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.requests.append(wanted)
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.ranges else 0
        if start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if wanted and self.server.ranges else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        limit = self.server.break_after
        self.wfile.write(content[start : None if limit is None else start + limit])

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def shop() -> Iterator[Shop]:
    server = Shop()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join(5)
    server.server_close()


def test_a_file_arrives_whole_and_its_progress_is_told(shop: Shop, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    target = tmp_path / "below" / "data.bin"
    download_file([shop.address()], target, MD5, progress=lambda *step: seen.append(step))
    assert target.read_bytes() == CONTENT
    assert seen[-1] == ("data.bin", len(CONTENT), len(CONTENT))
    assert [path.name for path in target.parent.iterdir()] == ["data.bin"]
    shop.files.clear()
    assert download_file([shop.address()], target, MD5) == target  # it is there: no request
    assert len(shop.requests) == 1


def test_an_interrupted_transfer_goes_on_where_it_stopped(shop: Shop, tmp_path: Path) -> None:
    shop.break_after = 120_000
    download_file([shop.address()], tmp_path / "data.bin", MD5)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    assert shop.requests == [None, "bytes=120000-", "bytes=240000-"]


def test_a_part_of_an_earlier_run_is_continued(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "data.bin.part").write_bytes(CONTENT[:1000])
    download_file([shop.address()], tmp_path / "data.bin", MD5)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    assert shop.requests == ["bytes=1000-"]


def test_a_server_without_ranges_sends_everything_again(shop: Shop, tmp_path: Path) -> None:
    shop.ranges = False
    (tmp_path / "data.bin.part").write_bytes(CONTENT[:1000])
    download_file([shop.address()], tmp_path / "data.bin", MD5)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


def test_a_whole_part_is_used_without_more_bytes(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "data.bin.part").write_bytes(CONTENT)
    download_file([shop.address()], tmp_path / "data.bin", MD5)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    assert shop.requests == [f"bytes={len(CONTENT)}-"]


@pytest.mark.parametrize("length", [1000, len(CONTENT) + 5])
def test_a_part_of_another_file_is_thrown_away(length: int, shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "data.bin.part").write_bytes(bytes(length))
    download_file([shop.address()], tmp_path / "data.bin", MD5)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


def test_a_server_that_sends_nothing_is_given_up(shop: Shop, tmp_path: Path) -> None:
    shop.break_after = 0
    with pytest.raises(TransferError, match="broke off 5 times"):
        download_file([shop.address()], tmp_path / "data.bin", MD5)
    assert not (tmp_path / "data.bin").exists()


def test_a_wrong_checksum_leaves_nothing(shop: Shop, tmp_path: Path) -> None:
    shop.files["/data.bin"] = b"<html>Too many requests</html>"
    with pytest.raises(TransferError, match=f"expected {MD5}: it is a web page"):
        download_file([shop.address()], tmp_path / "data.bin", MD5)
    assert list(tmp_path.iterdir()) == []


def test_mirrors_are_tried_in_order(shop: Shop, tmp_path: Path) -> None:
    shop.files["/bad.bin"] = CONTENT[::-1]
    urls = [shop.address("/missing.bin"), shop.address("/bad.bin"), shop.address()]
    download_file(urls, tmp_path / "data.bin", MD5)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    with pytest.raises(TransferError, match=r"missing\.bin: HTTP Error 404.*bad\.bin: its MD5"):
        download_file(urls[:2], tmp_path / "other.bin", MD5)


def test_a_damaged_file_put_there_by_hand_is_refused(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(CONTENT[:-1])
    with pytest.raises(ValueError, match="delete it and try again"):
        download_file([shop.address()], tmp_path / "data.bin", MD5)
    assert shop.requests == []


def make_zip(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        for name, content in members.items():
            zipped.writestr(name, content)
    return buffer.getvalue()


@pytest.fixture
def source(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A set `toy` with an archive of one folder."""
    content = make_zip({"toy/a.npy": b"one", "toy/b.npy": b"two", "toy/run.sh": b"no"})
    shop.files["/toy.zip"] = content
    item = Download(
        "toy.zip",
        (shop.address("/toy.zip"),),
        hashlib.md5(content).hexdigest(),
        ("toy/*.npy",),
        ("toy",),
    )
    source = Source("toy", "https://example.org/toy", "1 kB", (item,))
    monkeypatch.setitem(SOURCES, "toy", source)
    return source


def test_a_set_is_fetched_once_and_laid_out(source: Source, shop: Shop, tmp_path: Path) -> None:
    folder = fetch_set("toy", tmp_path)
    assert {path.name: path.read_bytes() for path in folder.glob("[!.]*")} == {
        "a.npy": b"one",
        "b.npy": b"two",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]
    fetch_set("toy", tmp_path)
    assert len(shop.requests) == 1


def test_an_archive_put_there_by_hand_needs_no_network(source: Source, shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "toy.zip").write_bytes(shop.files["/toy.zip"])
    (tmp_path / ".unpacking-toy.zip").mkdir()  # left by a killed run
    (tmp_path / ".unpacking-toy.zip" / "half.npy").write_bytes(b"h")
    assert sorted(path.name for path in fetch_set("toy", tmp_path).glob("[!.]*")) == ["a.npy", "b.npy"]
    assert shop.requests == []


def test_without_a_network_it_says_what_to_put_where(source: Source, shop: Shop, tmp_path: Path) -> None:
    shop.files.clear()
    expected = rf"download toy\.zip \(https://example\.org/toy\), put it into {re.escape(str(tmp_path))}"
    with pytest.raises(TransferError, match=expected):
        fetch_set("toy", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_archive_without_the_set_leaves_nothing(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = make_zip({"toy/readme": b"hello"})
    shop.files["/toy.zip"] = content
    item = Download(
        "toy.zip", (shop.address("/toy.zip"),), hashlib.md5(content).hexdigest(), ("toy/*.npy",), ("toy",)
    )
    monkeypatch.setitem(SOURCES, "toy", Source("toy", "page", "1 kB", (item,)))
    with pytest.raises(ValueError, match="none of the expected files"):
        fetch_set("toy", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["toy.zip"]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'cifar10'"):
        find_source("cifar-10")
    with pytest.raises(ValueError, match=r"register at https://image-net\.org"):
        find_source("imagenet")


def test_the_catalog_is_whole() -> None:
    corruptions = [product for item in SOURCES["imagenet-c"].downloads for product in item.products]
    from ttvd.data.corruptions import CORRUPTIONS, EXTRA

    assert sorted(corruptions) == sorted((*CORRUPTIONS, *EXTRA))
    for source in SOURCES.values():
        for item in source.downloads:
            assert re.fullmatch("[0-9a-f]{32}", item.md5)
            assert item.urls
            assert all(item.file in url for url in item.urls)


def test_nothing_is_fetched_by_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ttvd.data.sets import SETS, load_set

    monkeypatch.setattr(fetch, "fetch_set", lambda *_, **__: pytest.fail("a set was fetched unasked"))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    for name in sorted(set(SETS) & set(SOURCES)):
        with pytest.raises((OSError, ValueError)):
            load_set(name, tmp_path, corruption="fog" if name.endswith("-c") else None)
