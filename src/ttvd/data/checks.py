"""Checks of names and severities; each error says what was expected and what came."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


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
