"""Downloads that resume, are checked, and appear under their name only when they are whole."""

from __future__ import annotations

import hashlib
import http.client
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Final, Literal
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

Progress = Callable[[str, int, int | None], None]
"""Called with the name of the file, the bytes that are here and their final number, where known."""

BLOCK: Final = 1 << 20
_PATIENCE = 30.0
_ATTEMPTS = 5


class TransferError(OSError):
    """No address gave the file."""


def hash_file(path: Path, kind: Literal["md5", "sha256"] = "sha256") -> str:
    """Return the hexadecimal checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def download_file(urls: Sequence[str], target: Path, md5: str, *, progress: Progress | None = None) -> Path:
    """Fetch a file from the first address that gives it whole.

    What has arrived is kept in `target` + ".part" and continued by the next attempt or the next run.

    Args:
        urls: Addresses in the order in which they are tried.
        target: Where the file goes; if it is there already, it is only checked.
        md5: Its checksum.
        progress: Told how far it is.

    Raises:
        TransferError: No address gave the file; it says why for each.
        ValueError: `target` is there already, with another checksum.
    """
    if target.is_file():
        if reason := describe_mismatch(target, md5):
            raise ValueError(f"{target}: {reason}; delete it and try again")
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    reasons = []
    for url in urls:
        reason = _try(url, part, md5, lambda done, total: progress and progress(target.name, done, total))
        if not reason:
            part.replace(target)
            return target
        reasons.append(f"{url}: {reason}")
    raise TransferError("; ".join(reasons))


def describe_mismatch(path: Path, md5: str) -> str:
    """Say how a file differs from what was expected; nothing when it has the checksum."""
    found = hash_file(path, "md5")
    if found == md5:
        return ""
    with path.open("rb") as file:
        page = file.read(64).lstrip().startswith(b"<")
    kind = "a web page" if page else "damaged or another version"
    return f"its MD5 is {found}, expected {md5}: it is {kind}"


def _try(url: str, part: Path, md5: str, report: Callable[[int, int | None], Any]) -> str:
    """Fetch a file into `part`; return why it failed, nothing when it is there and whole."""
    resumed = part.exists()
    try:
        _transfer(url, part, report)
    except (OSError, http.client.HTTPException) as error:
        return _explain(error)
    reason = describe_mismatch(part, md5)
    if not reason:
        return ""
    part.unlink()
    # The beginning may have been of another file: what comes from one request alone is what the address has.
    return _try(url, part, md5, report) if resumed else reason


def _transfer(url: str, part: Path, report: Callable[[int, int | None], Any]) -> None:
    """Append to `part` until it is whole; give up after some attempts that brought nothing new."""
    idle = 0
    while idle < _ATTEMPTS:
        start = part.stat().st_size if part.exists() else 0
        if _receive(url, part, start, report):
            return
        idle = 0 if part.stat().st_size > start else idle + 1
    raise OSError(f"the connection broke off {_ATTEMPTS} times without bringing anything")


def _receive(url: str, part: Path, start: int, report: Callable[[int, int | None], Any]) -> bool:
    """Make one request; return whether the file is whole."""
    headers = {"User-Agent": "ttvd"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        response = urlopen(Request(url, headers=headers), timeout=_PATIENCE)
    except HTTPError as error:
        error.close()
        if error.code != 416:
            raise
        if error.headers.get("Content-Range", "").endswith(f"/{start}"):
            return True  # everything had arrived
        part.write_bytes(b"")  # longer than the file: it is of another one
        return False
    with response:
        if response.status != 206:
            start = 0  # the server sends the file from its beginning
        total = start + int(length) if (length := response.headers.get("Content-Length")) else None
        if total is not None and shutil.disk_usage(part.parent).free < total - start:
            raise OSError(
                f"{(total - start) / 1e9:.1f} GB are needed in {part.parent}, which has less free space"
            )
        with part.open("ab" if start else "wb") as file:
            done = _copy(response, file, start, lambda count: report(count, total))
    return total is None or done >= total


def _copy(response: IO[bytes], file: IO[bytes], done: int, report: Callable[[int], Any]) -> int:
    try:
        while block := response.read(BLOCK):
            file.write(block)
            done += len(block)
            report(done)
    except (TimeoutError, ConnectionError, http.client.IncompleteRead):
        pass  # what has arrived counts; the caller asks for the rest
    return done


def _explain(error: Exception) -> str:
    reason = error.reason if isinstance(error, URLError) and not isinstance(error, HTTPError) else error
    return str(reason) or type(error).__name__
