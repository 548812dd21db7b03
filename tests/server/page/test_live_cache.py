"""The view Live cache, on a real server's events."""

from __future__ import annotations

import re
from typing import Any

import httpx
from browser import Visit
from playwright.sync_api import Page, expect


def nodes_of(url: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{url}/v1/cache/tree?limit=1000", timeout=60, trust_env=False)
    nodes = answer.raise_for_status().json()["nodes"]
    assert isinstance(nodes, list)
    return nodes


def size(page: Page) -> Any:
    """What the view says of the tree's size."""
    return page.locator(".live-bar .lead")


def flush(visit: Visit) -> None:
    visit.page.get_by_role("button", name="Flush all").click()
    visit.page.get_by_role("dialog").get_by_role("button", name="Flush all").click()
    expect(size(visit.page)).to_have_text("The cache is empty.")


def ask(visit: Visit, question: str) -> None:
    """Asks from outside of the page."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 4}
    httpx.post(f"{visit.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)


def test_it_shows_what_is_kept_as_it_comes_and_goes(visit: Visit) -> None:
    page = visit.page
    visit.open("live")
    flush(visit)
    ask(visit, "What is kept of this question, which is longer than a block of the cache?")
    rows = page.get_by_role("treegrid").locator(".rows [role=row]")
    expect(rows.first).to_be_visible()
    feed = page.locator(".feed li")
    expect(feed.filter(has_text="cached")).not_to_have_count(0)
    expect(feed.filter(has_text="prompt tokens reused")).to_have_count(1)
    number = len(nodes_of(visit.url))
    expect(size(page)).to_contain_text(f"{number} node")
    ask(visit, "Another one, which is not at all like the first one: it has its own branch.")
    expect(size(page)).not_to_contain_text(f"{number} node")
    expect(size(page)).to_contain_text(f"{len(nodes_of(visit.url))} nodes")
    flush(visit)
    expect(rows).to_have_count(0)
    assert nodes_of(visit.url) == []


def test_a_flush_asks_first(visit: Visit) -> None:
    visit.open("live")
    ask(visit, "Something that is kept, and stays because the question is answered with no.")
    kept = len(nodes_of(visit.url))
    visit.page.get_by_role("button", name="Flush all").click()
    visit.page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(visit.page.get_by_role("dialog")).to_have_count(0)
    assert len(nodes_of(visit.url)) == kept > 0


def choose_picture(page: Page) -> None:
    """Chooses the first row of the table in which a picture begins."""
    page.get_by_role("treegrid").get_by_text("1 picture").first.click()


def test_a_picture_is_shown_to_the_browser_that_has_it_only(visit: Visit, server_url: str) -> None:
    page = visit.page
    visit.upload("shapes.png")
    visit.ask("What color is the star?")
    visit.open("live")
    choose_picture(page)
    expect(page.locator(".details img")).to_have_attribute("alt", "shapes.png")
    page.reload()
    choose_picture(page)
    expect(page.locator(".details img")).to_have_attribute("alt", "shapes.png")
    browser = page.context.browser
    assert browser is not None
    other = Visit(browser, server_url)
    other.open("live")
    choose_picture(other.page)
    expect(other.page.locator(".details")).to_contain_text("not from this browser")
    expect(other.page.locator(".details img")).to_have_count(0)
    other.close()


def test_an_answer_leads_to_what_it_reused(visit: Visit) -> None:
    page = visit.page
    visit.upload("heart.png")
    visit.ask("What is it?")
    visit.ask("What color is it?")
    page.locator(".reuse-of summary").last.click()
    page.locator(".reuse-of").last.get_by_role("link", name="in the live cache").click()
    expect(page.get_by_role("treegrid").locator("[aria-selected=true]")).to_be_visible()
    expect(page.locator(".details dl")).to_contain_text("users now")
    ask(visit, "Something that comes meanwhile, and leaves what was chosen as it is.")
    expect(page.locator(".feed li")).not_to_have_count(0)
    expect(page.get_by_role("treegrid").locator("[aria-selected=true]")).to_have_count(1)


def test_a_node_is_chosen_read_and_pinned(visit: Visit) -> None:
    page = visit.page
    visit.open("live")
    flush(visit)
    ask(visit, "A question whose tokens are to be read afterwards, all of them, here.")
    grid = page.get_by_role("treegrid")
    expect(grid.locator(".rows [role=row]").first).to_be_visible()
    grid.focus()
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    expect(grid.locator("[aria-selected=true]")).to_have_count(1)
    details = page.locator(".details")
    expect(details.locator("pre")).to_contain_text(" ")
    details.get_by_role("button", name="As text").click()
    expect(details.locator("pre")).to_contain_text("here.")
    details.get_by_role("button", name="Pin for 10 minutes").click()
    expect(details.get_by_role("status")).to_contain_text("tokens are pinned for 10 minutes.")
    expect(details.locator("dl")).to_contain_text("users now1")
    assert any(node["pins"] for node in nodes_of(visit.url))


HOLD_CHOICES = """
    const post = Worker.prototype.postMessage;
    globalThis.held = [];
    Worker.prototype.postMessage = function (message) {
        if (globalThis.holding && message.choose) held.push(() => post.call(this, message));
        else post.call(this, message);
    };
"""


def test_a_choice_outlasts_a_layout_that_was_on_its_way(visit: Visit) -> None:
    page = visit.page
    page.add_init_script(HOLD_CHOICES)
    visit.open("live")
    page.reload()
    flush(visit)
    ask(visit, "A question that is chosen in the table while another one is being asked.")
    grid = page.get_by_role("treegrid")
    chosen = grid.locator("[aria-selected=true]")
    page.evaluate("() => { globalThis.holding = true; }")
    grid.locator(".rows [role=row]").first.click()
    expect(chosen).to_have_count(1)
    ask(visit, "This is the other one, whose changes come before the worker knows of the choice.")
    expect(size(page)).to_contain_text(f"{len(nodes_of(visit.url))} nodes")
    page.evaluate("() => { held.forEach((send) => send()); }")
    expect(page.locator(".details dl")).to_contain_text("users now")
    expect(chosen).to_have_count(1)


def test_the_table_is_walked_by_keyboard(visit: Visit) -> None:
    page = visit.page
    visit.open("live")
    flush(visit)
    start = "A common beginning of some length that fills a block or two of the cache, and then "
    ask(visit, start + "one end.")
    ask(visit, start + "another end, which differs.")
    grid = page.get_by_role("treegrid")
    rows = grid.locator(".rows [role=row]")
    expect(size(page)).to_contain_text(f"{len(nodes_of(visit.url))} nodes")
    all_rows = int(grid.get_attribute("aria-rowcount") or 0) - 1
    expect(rows).to_have_count(all_rows)
    expect(rows.first).to_have_attribute("aria-expanded", "true")
    grid.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    expect(rows.first).to_have_attribute("aria-expanded", "false")
    expect(rows).to_have_count(1)
    page.keyboard.press("ArrowRight")
    expect(rows).to_have_count(all_rows)
    page.keyboard.press("ArrowRight")
    expect(grid).to_have_attribute("aria-activedescendant", "node-1")
    expect(page.locator("#node-1")).to_have_attribute("aria-level", "2")
    page.keyboard.press("End")
    expect(grid).to_have_attribute("aria-activedescendant", f"node-{all_rows - 1}")
    last = page.locator(f"#node-{all_rows - 1}")
    expect(last).to_have_class("active")
    level = int(last.get_attribute("aria-level") or 0)
    assert level > 1
    page.keyboard.press("ArrowLeft")  # to what it branches off from
    expect(grid.locator(".rows .active")).to_have_attribute("aria-level", str(level - 1))


def test_a_click_on_the_map_chooses(visit: Visit) -> None:
    visit.open("live")
    flush(visit)
    ask(visit, "A question that makes a bar on the map which is wide enough to be hit.")
    expect(visit.page.get_by_role("treegrid").locator(".rows [role=row]").first).to_be_visible()
    visit.page.locator(".icicle").click(position={"x": 40, "y": 8})
    expect(visit.page.locator(".details dl")).to_contain_text("0 to")
    expect(visit.page.locator("[aria-selected=true]")).to_have_count(1)


def test_gauges_tell_memory_and_the_last_minutes(visit: Visit) -> None:
    visit.open("live")
    ask(visit, "Something to do for the gauges, so that there are tokens and a latency to tell.")
    gauges = visit.page.locator(".gauges")
    expect(gauges.locator(".meters")).to_contain_text("keys, values")
    expect(gauges.locator(".meters")).to_contain_text("MiB")
    card = gauges.locator(".card")
    expect(card.filter(has_text="First token").locator("strong")).to_contain_text("s")
    expect(card.filter(has_text="Hit rate").locator("small")).to_contain_text("% in all")
    expect(card.filter(has_text="Running").locator("strong")).to_have_text("0")


def test_one_connection_for_all_tabs_and_none_while_nobody_looks(visit: Visit) -> None:
    page = visit.page
    assert visit.streams == 0, "the chat needs no events"
    visit.open("live")
    flush(visit)
    ask(visit, "Something to be seen in every tab that shows the cache at this moment.")
    expect(size(page)).to_contain_text("node")
    other = visit.tab()
    visit.open("live", other)
    expect(size(other)).to_have_text(size(page).inner_text())
    expect(other.locator(".meters")).to_contain_text("keys, values")
    assert visit.streams == 1
    ask(visit, "Something else, which the second tab is told by the first one only.")
    number = len(nodes_of(visit.url))
    for tab in (page, other):
        expect(size(tab)).to_contain_text(f"{number} nodes")
    assert visit.streams == 1
    page.close()  # the other one takes over
    ask(visit, "A third thing, after the tab that had the connection was closed.")
    expect(size(other)).to_contain_text(f"{len(nodes_of(visit.url))} nodes")
    assert visit.streams == 2
    other.evaluate("() => { location.hash = '#chat' }")
    expect(other.locator(".composer")).to_be_visible()
    stats = httpx.get(f"{visit.url}/load", timeout=60, trust_env=False).json()
    assert stats["server_load"] == 0
    ask(visit, "Nobody is told of this one, because nobody looks at the cache any more.")
    other.wait_for_timeout(500)
    assert visit.streams == 2


def test_a_hidden_tab_lets_go_of_the_connection(visit: Visit) -> None:
    """What a browser says when another tab comes to the front; headless ones never do."""
    page = visit.page
    visit.open("live")
    hide = """(hidden) => {
        Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    expect(page.locator(".meters")).to_contain_text("keys, values")
    with page.expect_event("requestfailed", lambda it: it.url.endswith("/v1/cache/events")):
        page.evaluate(hide, True)
    page.evaluate(hide, False)
    ask(visit, "Something that comes after the tab is seen again, and is told of.")
    expect(size(page)).to_contain_text(f"{len(nodes_of(visit.url))} node")
    assert visit.streams == 2


def test_it_begins_with_the_servers_last_minutes(visit: Visit) -> None:
    """What happened while no page was open: in the gauges and among the events."""
    page = visit.page
    for number in range(3):
        ask(visit, f"Something that happens before anybody looks, for the time number {number}.")
    page.wait_for_timeout(6000)  # the server keeps a status every five seconds
    visit.open("live")
    feed = page.locator(".feed li")
    expect(feed.filter(has_text="prompt tokens reused").first).to_be_visible()
    assert feed.filter(has_text="cached").count() > 0
    # A line needs two statuses; the stream brings one a second.
    expect(page.locator(".gauges .card path").first).to_have_attribute("d", re.compile("L|M"))
    other = visit.tab()
    visit.open("live", other)
    expect(other.locator(".feed li")).to_have_count(feed.count())
