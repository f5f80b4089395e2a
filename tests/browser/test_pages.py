"""Pages open without errors, show the provenance of numbers, and fit phones and paper."""

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.helpers.browser import SHOTS, Visit, watch

Shoot = Callable[[Page, str], None]


@pytest.mark.parametrize("width", [1360, 390])
@pytest.mark.parametrize("name", ["index", "changes", "plain"])
def test_it_opens_and_nothing_is_wider_than_the_window(
    visit: Visit, shoot: Shoot, name: str, width: int
) -> None:
    page = visit(name, width=width)
    expect(page.locator("h1")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    broken = page.eval_on_selector_all("img", "all => all.filter((i) => !i.naturalWidth).length")
    assert broken == 0
    shoot(page, f"{name}-{width}")


def test_the_watch_can_fail(browser: Browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='http://127.0.0.1:9/x.png'><script>console.log('hm'); nothing();</script>")
    complaints: list[str] = []
    page = browser.new_page()
    watch(page, complaints)
    page.goto(bad.as_uri())
    page.close()
    for kind in ("request: http://127.0.0.1:9/x.png", "console: hm", "error: nothing is not defined"):
        assert any(complaint.startswith(kind) for complaint in complaints)


def test_a_number_opens_a_card_with_its_runs(visit: Visit, shoot: Shoot) -> None:
    page = visit("index")
    link = page.locator("table.wide td a.from").nth(3)
    link.scroll_into_view_if_needed()
    link.hover()
    title = link.get_attribute("title") or ""
    link.click()
    card = page.locator("#card")
    expect(card).to_be_visible()
    words = card.inner_text()
    for text in (
        "Seeds",
        "Runs",
        "Order of the stream",
        "Versions",
        "Device",
        "Chosen by",
        "Parameters",
        "Started",
    ):
        assert text in words
        assert f"{text}:" in title
    row = page.locator(f"tr{link.get_attribute('href')}")
    key = row.locator("td").nth(2).text_content() or ""
    assert len(key) >= 16
    assert key in words
    shoot(page, "card")
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()


def test_the_keyboard_opens_and_closes_the_card(visit: Visit) -> None:
    page = visit("index")
    link = page.locator("table td a.from").first
    link.focus()
    page.keyboard.press("Enter")
    card = page.locator("#card")
    expect(card).to_be_visible()
    assert page.evaluate("document.getElementById('card').contains(document.activeElement)")
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    assert link.evaluate("(node) => node === document.activeElement")


def test_the_card_leads_to_all_runs_of_the_line(visit: Visit, shoot: Shoot) -> None:
    page = visit("index")
    link = page.locator("table.wide td a.from").nth(3)
    link.click()
    page.locator("#card p a").click()
    expect(page.locator("#card")).to_be_hidden()
    row = page.locator(f"tr{link.get_attribute('href')}")
    expect(row).to_be_in_viewport()
    shoot(page, "runs")


def test_every_number_has_a_place_that_tells_of_it(visit: Visit) -> None:
    page = visit("index")
    lost = page.eval_on_selector_all(
        "a.from", "all => all.filter((link) => !document.getElementById(link.hash.slice(1))).length"
    )
    bare = page.eval_on_selector_all(
        "section:not(.unprinted) td[data-value]:not([data-value='']):not(.words)",
        "all => all.filter((cell) => !cell.querySelector('a.from')).length",
    )
    assert (lost, bare) == (0, 0)


def test_a_link_to_runs_opens_what_hides_them(visit: Visit) -> None:
    row = visit("index", anchor="#s1-l1-c1").locator("#s1-l1-c1")
    expect(row).to_be_in_viewport()


def test_without_scripts_numbers_are_links(visit: Visit) -> None:
    page = visit("index", java_script_enabled=False)
    link = page.locator("table.wide td a.from").first
    link.click()
    assert page.url.endswith(link.get_attribute("href") or "?")
    expect(page.locator(f"tr{link.get_attribute('href')}")).to_be_visible()


def test_lines_can_be_hidden_by_rule(visit: Visit) -> None:
    page = visit("index")
    rows = page.locator("tr[data-rule=oracle]")
    assert rows.count() > 0
    expect(rows.first).to_be_visible()
    page.get_by_label("oracle").uncheck()
    assert not any(row.is_visible() for row in rows.all())
    expect(page.locator("tr[data-rule=validation]").first).to_be_visible()


def test_tables_can_be_saved(visit: Visit, tmp_path: Path) -> None:
    page = visit("index")
    files = (("CSV", "csv", "method,model"), ("LaTeX", "tex", "%"), ("Markdown", "md", "| method"))
    for label, suffix, begins in files:
        with page.expect_download() as waiting:
            page.locator(".saves a", has_text=label).first.click()
        path = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(path)
        assert path.suffix == f".{suffix}"
        assert path.read_text(encoding="utf-8").startswith(begins)


def test_on_a_phone_names_stay_in_sight_and_a_tap_tells(visit: Visit, shoot: Shoot) -> None:
    page = visit("index", width=390, has_touch=True, is_mobile=True)
    box = page.locator(".scroll", has=page.locator("table.wide")).first
    box.scroll_into_view_if_needed()
    name = box.locator("tbody th").first
    before = name.bounding_box()
    box.evaluate("(node) => { node.scrollLeft = 300; }")
    after = name.bounding_box()
    assert before is not None
    assert after is not None
    assert box.evaluate("(node) => node.scrollLeft") == 300
    assert after["x"] == before["x"]
    shoot(page, "phone-table")
    page.locator("table.wide td a.from").nth(6).tap()
    card = page.locator("#card").bounding_box()
    assert card is not None
    assert card["x"] >= 0
    assert card["x"] + card["width"] <= 390
    shoot(page, "phone-card")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_on_paper_tables_fit_and_controls_are_gone(visit: Visit) -> None:
    page = visit("index", width=1047)  # A4 landscape between its margins, in pixels
    page.emulate_media(media="print")
    for selector in ("nav", ".saves", ".rules", "#card"):
        expect(page.locator(selector).first).to_be_hidden()
    wide = page.locator("table.wide").first.bounding_box()
    assert wide is not None
    assert wide["width"] <= 1047
    SHOTS.mkdir(parents=True, exist_ok=True)
    paper = page.pdf(path=SHOTS / "index.pdf", prefer_css_page_size=True)
    assert paper.startswith(b"%PDF")
