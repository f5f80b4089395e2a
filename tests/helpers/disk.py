"""A disk that fails: what a power cut may leave of the files in a folder, and a disk that is full."""

import errno
import io
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

Files = dict[str, bytes]
"""Content of a folder by the names of its files."""
Change = tuple[str | None, str | None, int]
"""A name that goes, a name that comes, and the number of the file."""


class Disk:
    """Watches the files of a folder, and knows what of them is on the disk.

    Content is on the disk once its file was synced, names are once their folder was. All else may be lost in a power
    cut, in whole or in part and in any order. A rename is atomic.

    Args:
        folder: The folder, which has no folders inside. What it holds at first is on the disk.
        keep: An empty folder on the same file system. Files stay there, so that the system does not give their
            numbers to other files.
        on_operation: Called before every operation on a file of the folder: a write, a cut, a sync, a rename, a
            removal. It may raise an exception in place of the operation.
        space: Number of bytes that can be written before the disk is full.
    """

    def __init__(
        self,
        folder: Path,
        keep: Path,
        on_operation: Callable[[], None] | None = None,
        space: int | None = None,
    ) -> None:
        self._system: dict[str, Callable[..., Any]] = {}
        self._folder, self._keep, self._on_operation, self._space = folder, keep, on_operation, space
        self.written = 0
        self._live = self._list()
        self._names = dict(self._live)
        self._contents = {number: self._read(number) for number in self._live.values()}
        self._changes: list[Change] = []

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of the system's functions."""
        self._system = {
            name: getattr(os, name) for name in ("write", "fsync", "ftruncate", "replace", "unlink")
        }
        open_file = Path.open

        def open_watched(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if mode == "wb" and path.parent == self._folder:
                return io.BufferedWriter(_PlainFile(path, "wb"))
            return open_file(path, mode, *arguments, **options)

        for name in self._system:
            monkeypatch.setattr(os, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(Path, "open", open_watched)

    def cut_power(self) -> Iterator[Files]:
        """Yield what the folder may hold after a power cut at this moment."""
        self._look()
        for count in range(len(self._changes) + 1):
            for changes in combinations(self._changes, count):
                names = dict(self._names)
                for gone, come, number in changes:
                    names.pop(gone or "", None)
                    names |= {} if come is None else {come: number}
                numbers = sorted(set(names.values()))
                for contents in product(*(self._contents_after_cut(number) for number in numbers)):
                    found = dict(zip(numbers, contents, strict=True))
                    yield {name: found[number] for name, number in names.items()}

    def _contents_after_cut(self, number: int) -> Sequence[bytes]:
        synced, live = self._contents.get(number, b""), self._read(number)
        if synced == live:
            return [live]
        same = 0
        while same < min(len(synced), len(live)) and synced[same] == live[same]:
            same += 1
        parts = [live[:end] for end in (same, same + 1, (same + len(live)) // 2, max(same, len(live) - 1))]
        return list(dict.fromkeys([synced, live, *parts, live[:same] + bytes(len(live) - same)]))

    def _write(self, file: int, content: bytes) -> int:
        if os.fstat(file).st_ino not in self._look().values():
            return int(self._system["write"](file, content))
        self._operate()
        left = len(content) if self._space is None else min(self._space - self.written, len(content))
        if left == 0 and len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.written += left
        return int(self._system["write"](file, content[:left]))

    def _fsync(self, file: int) -> None:
        self._operate()
        self._system["fsync"](file)
        if os.path.samestat(os.fstat(file), os.stat(self._folder)):
            self._names, self._changes = dict(self._live), []
        else:
            self._contents[os.fstat(file).st_ino] = self._read(os.fstat(file).st_ino)

    def _ftruncate(self, file: int, size: int) -> None:
        self._operate()
        self._system["ftruncate"](file, size)

    def _replace(self, source: Path, target: Path) -> None:
        self._operate()
        self._system["replace"](source, target)
        self._note_change(source.name, target.name)

    def _unlink(self, path: Path) -> None:
        if path.name in self._look():
            self._operate()
        self._system["unlink"](path)
        self._note_change(path.name, None)

    def _operate(self) -> None:
        self._look()
        if self._on_operation is not None:
            self._on_operation()

    def _look(self) -> dict[str, int]:
        """Notice files that were made since the last look."""
        now = self._list()
        self._changes += [(None, name, now[name]) for name in now if name not in self._live]
        self._live = now
        return now

    def _note_change(self, gone: str, come: str | None) -> None:
        number = self._live.get(gone)
        self._live = self._list()
        if number is not None:
            self._changes.append((gone, come, number))

    def _list(self) -> dict[str, int]:
        numbers = {entry.name: entry.stat().st_ino for entry in os.scandir(self._folder)}
        for name, number in numbers.items():
            if not (kept := self._keep / str(number)).exists():
                os.link(self._folder / name, kept)
        return numbers

    def _read(self, number: int) -> bytes:
        with io.open(self._keep / str(number), "rb") as file:  # noqa: UP020 - Path.open is replaced
            return file.read()


class _PlainFile(io.FileIO):
    """A file that is written by `os.write`, which a disk watches."""

    def write(self, content: Any) -> int:
        return os.write(self.fileno(), bytes(content))


def write_files(folder: Path, files: Files) -> Path:
    """Make a folder with this content."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder
