"""Tables sort by click and by keyboard, as numbers, with missing values last."""

import pytest
from playwright.sync_api import Locator, Page

from tests.helpers.browser import Visit


def read(table: Locator, column: int) -> list[str]:
    values: list[str] = table.locator("tbody tr").evaluate_all(
        "(rows, column) => rows.map((row) => row.cells[column].dataset.value)", column
    )
    return values


def head(page: Page, text: str) -> Locator:
    return page.locator("th button", has_text=text).first


def test_numbers_sort_as_numbers_and_missing_ones_stay_last(visit: Visit) -> None:
    page = visit("plain")
    table = page.locator("table")
    button = head(page, "number")
    button.click()
    assert read(table, 1) == ["-1.5", "9.0", "9.0", "10.0", "100.0", "", ""]
    button.click()
    assert read(table, 1) == ["100.0", "10.0", "9.0", "9.0", "-1.5", "", ""]


def test_equal_rows_keep_their_order_and_a_third_press_restores_it(visit: Visit) -> None:
    page = visit("plain")
    table = page.locator("table")
    button = head(page, "number")
    button.click()
    assert read(table, 0) == list("fceadbg")
    button.click()
    assert read(table, 0) == list("dacefbg")
    button.click()
    assert read(table, 0) == list("abcdefg")


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_the_keyboard_sorts_too_and_says_how(visit: Visit, key: str) -> None:
    page = visit("plain")
    table = page.locator("table")
    head(page, "name").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "number"
    cell = page.locator("thead th").nth(1)
    states = []
    for _ in range(3):
        page.keyboard.press(key)
        states.append(cell.get_attribute("aria-sort"))
    assert states == ["ascending", "descending", None]
    page.keyboard.press(key)
    assert read(table, 1)[0] == "-1.5"
    head(page, "name").click()
    assert cell.get_attribute("aria-sort") is None


def test_tables_with_headings_of_headings_sort(visit: Visit) -> None:
    page = visit("index")
    table = page.locator("table.wide").first
    before = read(table, 2)
    table.locator("th button", has_text="gaussian").click()
    after = read(table, 2)
    numbers = [float(value) for value in after if value]
    assert sorted(before) == sorted(after)
    assert numbers == sorted(numbers)
    assert len(numbers) < len(after)
    assert after[-1] == ""
    assert table.locator("tbody tr").last.locator("th").inner_text().startswith("bn")


def test_the_other_tables_stay_as_they_are(visit: Visit) -> None:
    page = visit("index")
    first, second = page.locator("table").nth(0), page.locator("table").nth(1)
    before = read(second, 0)
    first.locator("th button").nth(2).click()
    assert read(second, 0) == before
