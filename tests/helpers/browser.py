"""What the tests in a browser share: where screenshots go, and a watch on what a page does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from playwright.sync_api import Page

SHOTS = Path(__file__).parents[2] / "out" / "browser"
Visit: TypeAlias = "Callable[..., Page]"


def watch(page: Page, complaints: list[str]) -> None:
    """Record what a page prints, the errors of its scripts, and requests outside its own file."""

    def check(url: str) -> None:
        if not url.startswith(("file:", "data:")):
            complaints.append(f"request: {url}")

    page.on("console", lambda message: complaints.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("request", lambda request: check(request.url))
