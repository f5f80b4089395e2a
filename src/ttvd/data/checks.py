"""Checks of names and severities, and checksums of files."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal


def check_choice(value: str, choices: Sequence[str], what: str) -> None:
    """Raise a ValueError that suggests the nearest name, unless `value` is one of `choices`."""
    if value in choices:
        return
    near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)
    raise ValueError(f"unknown {what} {value!r}; did you mean {near[0]!r}? Known: {', '.join(choices)}")


def check_severity(severity: int) -> None:
    """Raise a ValueError unless `severity` is an integer from 1 to 5."""
    if isinstance(severity, bool) or not isinstance(severity, int) or not 1 <= severity <= 5:
        raise ValueError(f"severity must be an integer from 1 to 5, got {severity!r}")


def hash_file(path: Path, kind: Literal["md5", "sha256"] = "sha256") -> str:
    """Return the hexadecimal checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()
