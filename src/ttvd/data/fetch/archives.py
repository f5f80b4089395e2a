"""Unpacking of archives: only the expected regular files, and nothing outside the folder."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath


def unpack(archive: Path, folder: Path, members: Sequence[str]) -> int:
    """Unpack the expected members of a tar or zip archive.

    Args:
        archive: The file; its kind is told by its content.
        folder: Where to put the members.
        members: Patterns of expected names; every other member is left in the archive.

    Returns:
        The number of files written.

    Raises:
        ValueError: The archive is damaged, has none of the members, or one that would leave the folder.
    """
    try:
        unpack_kind = _unpack_zip if zipfile.is_zipfile(archive) else _unpack_tar
        count = unpack_kind(archive, folder, members)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{archive} cannot be unpacked: {error}") from error
    if not count:
        raise ValueError(f"{archive} has none of the expected files: {', '.join(members)}")
    return count


def _unpack_tar(archive: Path, folder: Path, members: Sequence[str]) -> int:
    count = 0
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and _is_expected(member.name, members):
                tar.extract(member, folder, filter="data")
                count += 1
    return count


def _unpack_zip(archive: Path, folder: Path, members: Sequence[str]) -> int:
    count = 0
    with zipfile.ZipFile(archive) as zipped:
        for member in zipped.infolist():
            if not member.is_dir() and _is_expected(member.filename, members):
                target = folder / member.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                with zipped.open(member) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                count += 1
    return count


def _is_expected(name: str, members: Sequence[str]) -> bool:
    path = PurePosixPath(name)
    clean = str(path)  # without a leading ./
    if not any(fnmatchcase(clean, pattern) for pattern in members):
        return False
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise ValueError(
            f"the archive has a member {name!r}, which would leave the folder; do not use this file"
        )
    return True
