"""Servers, archives, trees of image files and small sets for the tests of data."""

import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from ttvd.data.sets import ImageSet, from_arrays

CLOSED = "http://127.0.0.1:9/gone"
"""An address where nobody listens: the port of "discard"."""


class FileServer(ThreadingHTTPServer):
    """Serves files on the loopback device.

    Attributes:
        files: Content of each path.
        break_after: Number of bytes after which every connection breaks off.
        ranges: Whether ranges are served.
        requests: Range of each request.
    """

    daemon_threads = True

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = dict(files)
        self.break_after: int | None = None
        self.ranges = True
        self.requests: list[str | None] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

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
        """Print nothing."""


@contextmanager
def serve(files: Mapping[str, bytes]) -> Iterator[FileServer]:
    server = FileServer(files)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()


def make_zip(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        for name, content in members.items():
            zipped.writestr(name, content)
    return buffer.getvalue()


def make_tar(members: Mapping[str, bytes], *, link: str | None = None) -> bytes:
    """A compressed archive; `link` names a member that is a link to another folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        if link is not None:
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc"
            tar.addfile(info)
    return buffer.getvalue()


def read_files(folder: Path) -> dict[str, bytes]:
    """The content of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def random_pixels(size: tuple[int, int], seed: int) -> npt.NDArray[np.uint8]:
    """An image of some width and height as bytes (h, w, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)


def write_images(root: Path, *names: str, size: tuple[int, int] = (40, 36)) -> None:
    """Write random image files."""
    for seed, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random_pixels(size, seed)).save(root / name)


def write_class_folders(root: Path, size: tuple[int, int] = (40, 36)) -> None:
    """Write five image files in three class folders, and a text file."""
    write_images(root, "n03/b.png", "n03/a.JPEG", "n01/x.png", "n02/sub/deep.png", "n02/z.jpg", size=size)
    (root / "n01" / "notes.txt").write_text("no picture")


def make_set(count: int, classes: tuple[str, ...] = ("ant", "bee", "cow")) -> ImageSet:
    """Random images of 16 x 16."""
    images = torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return from_arrays(images, torch.arange(count) * 2 % len(classes), classes=classes, name="toy")
