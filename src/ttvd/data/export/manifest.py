"""The record of an export: what was asked for, and the checksum of every file that is finished.

`manifest.json` says what the export is, which corruptions are finished, and the checksums (those of a tree of
pictures, which can be millions, by way of `SHA256SUMS`). `SHA256SUMS` grows while the export runs and tells the next
run what is done; `sha256sum --check SHA256SUMS` verifies an export.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ttvd.data.export.lock import LOCK, is_temporary
from ttvd.data.fetch.download import hash_file
from ttvd.files import open_atomic

MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"


class Ledger:
    """The finished files of an export, whose folder the caller has locked.

    Args:
        folder: Where the export goes: empty, or begun by an earlier run.
        settings: What it depends on. A folder that was begun with others is refused, but corruptions may be added.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._settings = json.loads(json.dumps(settings))
        self._finished: set[str] = set()
        self._compare()
        self._sums = _read_sums(folder / SUMS)
        self._write_manifest()  # first: a folder with other files but without it is refused
        self._write_sums()  # without a line that a kill cut off

    @property
    def corruptions(self) -> frozenset[str]:
        """Names of the corruptions of this and of earlier runs."""
        return frozenset(self._settings["corruptions"])

    def holds(self, name: str) -> bool:
        """Whether a file is finished and unchanged."""
        path = self._folder / name
        return name in self._sums and path.is_file() and hash_file(path) == self._sums[name]

    def add(self, sums: Mapping[str, str]) -> None:
        """Note finished files."""
        self._sums |= sums
        with (self._folder / SUMS).open("a", encoding="utf-8") as file:
            file.writelines(f"{digest}  {name}\n" for name, digest in sums.items())
            file.flush()
            os.fsync(file.fileno())

    def close(self, corruptions: Iterable[str], *, list_files: bool) -> None:
        """Declare corruptions finished.

        Args:
            corruptions: Those of this run.
            list_files: Put the checksum of every file into the manifest; otherwise that of `SHA256SUMS`.
        """
        self._finished |= set(corruptions)
        self._write_sums()
        files = self._sums if list_files else {SUMS: hash_file(self._folder / SUMS)}
        self._write_manifest(files=dict(sorted(files.items())))

    def _compare(self) -> None:
        path = self._folder / MANIFEST
        if not path.is_file():
            self._refuse_others()
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            made, finished = dict(found["corruptions"]), set(found["finished"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged or not of an export ({error!r}); choose another folder"
            ) from error
        for key, value in self._settings.items():
            if key != "corruptions" and found.get(key) != value:
                raise ValueError(
                    f"{self._folder} holds another export: its {key} differs; choose another folder or delete this one"
                )
        self._settings["corruptions"] |= made
        self._finished = finished

    def _refuse_others(self) -> None:
        """Raise if there is anything that no export made: it might be overwritten."""
        for entry in sorted(self._folder.iterdir()):
            if entry.name != LOCK and not is_temporary(entry.name, of=MANIFEST):
                raise ValueError(
                    f"{self._folder} is not empty (it has {entry.name}) and has no {MANIFEST} of an earlier run; "
                    "choose a new or an empty folder"
                )

    def _write_sums(self) -> None:
        lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(self._sums.items()))
        with open_atomic(self._folder / SUMS) as file:
            file.write(lines.encode())

    def _write_manifest(self, **more: Any) -> None:
        with open_atomic(self._folder / MANIFEST) as file:
            content = {**self._settings, "finished": sorted(self._finished), **more}
            file.write(json.dumps(content, indent=2).encode() + b"\n")


def _read_sums(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n") and line[64:66] == "  "]
    return {line[66:-1]: line[:64] for line in whole}
