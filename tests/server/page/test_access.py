"""For everybody: by keyboard, with a screen reader, on a small screen, in light and dark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Visit, answer_of
from page_checks import LARGE, SMALL, fits, violations
from playwright.sync_api import Browser, Page, expect


@pytest.fixture(params=[("light", LARGE), ("dark", SMALL)], ids=["light, large", "dark, small"])
def filled(request: pytest.FixtureRequest, browser: Browser, server_url: str) -> Iterator[Visit]:
    """The page with two answers about a picture."""
    scheme, size = request.param
    visit = Visit(browser, server_url, color_scheme=scheme, viewport=size)
    visit.open()
    visit.upload("shapes.png")
    visit.ask("What color is the star?")
    visit.ask("Where is the triangle?")
    yield visit
    visit.close()
    assert visit.errors == []
    assert visit.strangers == []


@pytest.mark.parametrize("view", ["chat", "reuse", "live"])
def test_a_view_has_no_serious_violation_and_fits(filled: Visit, view: str) -> None:
    page = filled.page
    filled.open(view)
    main = page.locator("main:visible")
    expect(main.locator("h1")).to_be_visible()
    if view == "live":
        expect(page.locator(".treegrid .rows [role=row]").first).to_be_visible()
    if view == "chat":
        page.locator(".reuse-of summary").last.click()
    assert violations(page) == []
    assert fits(page), "the page is wider than the screen"


@pytest.mark.parametrize("name", ["Options", "API key"])
def test_a_dialog_has_no_serious_violation_and_gives_the_focus_back(
    filled: Visit, name: str
) -> None:
    page = filled.page
    opener = page.get_by_role("button", name=name)
    opener.click()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert violations(page) == []
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(opener).to_be_focused()


def test_a_small_screen_shows_the_conversations_on_demand(
    browser: Browser, server_url: str
) -> None:
    visit = Visit(browser, server_url, viewport=SMALL)
    visit.open()
    visit.ask("One?")
    page = visit.page
    expect(page.locator(".sidebar")).to_be_hidden()
    page.get_by_role("button", name="Conversations").click()
    page.locator(".sidebar").get_by_role("button", name="New conversation").click()
    expect(page.locator(".sidebar")).to_be_hidden()
    expect(page.locator(".turn")).to_have_count(0)
    visit.close()


def focused(page: Page) -> str:
    """The name of what has the focus."""
    return str(
        page.evaluate(
            """() => {
                const at = document.activeElement;
                const label = at.labels?.[0]?.textContent;
                return at.ariaLabel ?? label ?? at.textContent.trim();
            }"""
        )
    )


def tab_to(page: Page, name: str) -> None:
    """Presses the tab key until something of this name has the focus."""
    for _ in range(40):
        page.keyboard.press("Tab")
        if focused(page) == name:
            return
    raise AssertionError(f"the tab key does not lead to {name!r}")


def test_the_whole_page_works_by_keyboard(visit: Visit) -> None:
    page = visit.page
    tab_to(page, "Question")
    page.keyboard.type("Hello?")
    page.keyboard.press("Enter")
    expect(page.locator(".numbers-line")).to_be_visible()
    assert answer_of(page, 0)
    tab_to(page, "What was reused")
    page.keyboard.press("Enter")
    expect(page.locator(".reports > li")).to_have_count(1)
    tab_to(page, "Live cache")
    page.keyboard.press("Enter")
    expect(page.locator("main.live")).to_be_visible()


def test_colours_follow_the_system_and_the_choice(browser: Browser, server_url: str) -> None:
    visit = Visit(browser, server_url, color_scheme="dark")
    visit.open()
    page = visit.page
    colour = "() => getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(colour)
    page.get_by_role("button", name="Colours: as the system").click()
    light = page.evaluate(colour)
    assert light != dark
    page.reload()
    assert page.evaluate(colour) == light
    page.get_by_role("button", name="Colours: light").click()
    assert page.evaluate(colour) == dark
    visit.close()
