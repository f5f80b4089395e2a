"""A headless Chromium, pages with invented numbers, and a record of what the pages do.

`make test-browser` runs these tests. They are not part of `make test`, and they never pass without a browser.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from tools.find_browser import find_browser

from tests.helpers.browser import SHOTS, Visit, watch
from tests.helpers.report import BASIC, CONDITIONS, FakeStore
from ttvd.bench.store import Store
from ttvd.report.diff import make_diff_page
from ttvd.report.document import Cell, Document, Section, Table
from ttvd.report.html import render_html, write_report
from ttvd.report.study import make_page

QUIET = [
    f"--{flag}" for flag in ("disable-gpu", "disable-background-networking", "disable-sync", "no-first-run")
]
WIDE = BASIC.replace('corruptions = ["fog", "gaussian_noise", "contrast"]', 'corruptions = "all"').replace(
    '["grid-best", "validation"]', '["grid-best", "validation", "oracle"]'
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    try:
        path = find_browser()
    except FileNotFoundError as error:
        pytest.fail(str(error))
    flags = [*QUIET, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=flags)
        yield found
        found.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of a store with a gap and a failure, the page of differences, and a page with a plain table."""
    folder = tmp_path_factory.mktemp("pages")
    store = FakeStore(
        ("wide", WIDE), ("sizes", CONDITIONS.replace("noise and blur", "small batches")), batches=5
    )
    keys = [m.spec.key for m in store.members("wide") if m.label == "tent" and m.role == "test"]
    store.break_run(keys[0], "Traceback (most recent call last):\nRuntimeError: out of memory")
    store.lose(*{m.spec.key for m in store.members("wide") if m.label == "bn"})
    before = FakeStore(("sizes", CONDITIONS.replace("seeds = [0, 1]", "seeds = [0]")), batches=5, shift=0.1)
    index, *_ = write_report(make_page(cast(Store, store)), folder)
    names = ("now.db", "before.db")
    changes, *_ = write_report(
        make_diff_page(cast(Store, store), cast(Store, before), names), folder, "changes.html"
    )
    plain = folder / "plain.html"
    section = Section("Results", "results", [make_table()])
    plain.write_text(render_html(Document("Plain", ["lead"], [section])), encoding="utf-8")
    return {"index": index, "changes": changes, "plain": plain}


def make_table() -> Table:
    """Numbers whose order differs from that of their texts, equal numbers, and missing ones."""
    values: list[float | str] = [10.0, "", 9.0, 100.0, 9.0, -1.5, ""]
    rows = [
        [Cell(name, name), Cell(f"{value}", value)] for name, value in zip("abcdefg", values, strict=True)
    ]
    return Table(["name", "number"], rows)


@pytest.fixture
def visit(browser: Browser, pages: dict[str, Path]) -> Iterator[Visit]:
    """Open a page; afterwards fail if it printed, raised or requested anything outside its file."""
    complaints: list[str] = []
    opened = []

    def visit(name: str, *, anchor: str = "", width: int = 1360, **options: Any) -> Page:
        height = 844 if width < 700 else 900
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        opened.append(context)
        page = context.new_page()
        watch(page, complaints)
        page.goto(pages[name].as_uri() + anchor)
        return page

    yield visit
    for context in opened:
        context.close()
    assert complaints == []


@pytest.fixture
def shoot() -> Callable[[Page, str], None]:
    """Save a screenshot, for people to look at."""

    def shoot(page: Page, name: str) -> None:
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SHOTS / f"{name}.png")

    return shoot
