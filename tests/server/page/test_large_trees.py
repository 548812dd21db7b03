"""A tree of 10 000 nodes: drawn in time, and only where it is seen."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import pytest
from browser import Visit
from page_tree import event, telling, tree_of
from playwright.sync_api import Browser, expect

NUM_NODES = 10_000
FRAME_MS = 1000 / 30

SCROLL = """async (numFrames) => {
    const area = document.querySelector(".icicle");
    const drawn = [];
    const observer = new PerformanceObserver(
        (list) => drawn.push(...list.getEntriesByName("icicle")));
    observer.observe({type: "measure"});
    const steps = numFrames / 2;
    for (let frame = 0; frame < numFrames; frame += 1) {
        const share = frame < steps ? frame / steps : (numFrames - frame) / steps;
        area.scrollTop = share * (area.scrollHeight - area.clientHeight);
        await new Promise(requestAnimationFrame);
    }
    await new Promise((resolve) => setTimeout(resolve, 100));
    return drawn.map((entry) => entry.duration);
}"""


@pytest.fixture(scope="module")
def large(browser: Browser, server_url: str) -> Iterator[Visit]:
    visit = Visit(browser, server_url)
    told = event("tree", tree_of(NUM_NODES))
    visit.page.route("**/v1/cache/events", lambda route: telling(route, told))
    visit.open("live")
    expect(visit.page.locator(".live-bar .lead")).to_contain_text("10\u202f000 nodes")
    yield visit
    visit.close()
    assert visit.errors == []


def test_drawing_leaves_most_of_a_frame_while_it_scrolls(large: Visit) -> None:
    """The page's own work: how many frames a loaded machine shows is no matter of the page."""
    times = large.page.evaluate(SCROLL, 120)
    assert len(times) > 30, "scrolling draws"
    assert statistics.median(times) < FRAME_MS / 2


def test_the_table_has_the_rows_in_sight_only(large: Visit) -> None:
    page = large.page
    grid = page.get_by_role("treegrid")
    rows = grid.locator(".rows [role=row]")
    most = int(grid.get_attribute("aria-rowcount") or 0)
    assert most > 1000
    assert 0 < rows.count() < 60
    grid.focus()
    page.keyboard.press("End")
    expect(grid.locator(f"[aria-rowindex='{most}']")).to_be_visible()
    active = grid.get_attribute("aria-activedescendant")
    expect(page.locator(f"#{active}")).to_be_visible()
    assert rows.count() < 60
    page.keyboard.press("Home")
    expect(grid.locator("[aria-rowindex='2']")).to_be_visible()


def test_zooming_shows_more_of_less_and_all_again(large: Visit) -> None:
    page = large.page
    area = page.locator(".icicle")
    size = "(area) => [area.scrollWidth, area.clientWidth]"
    width, seen = area.evaluate(size)
    assert width == seen
    area.focus()
    for _ in range(4):
        page.keyboard.press("+")
    assert area.evaluate(size)[0] > 4 * seen
    page.get_by_role("button", name="Show all").click()
    assert area.evaluate(size)[0] == seen
