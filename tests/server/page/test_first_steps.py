"""What a newcomer meets: the box, examples, words, keys, and little to load."""

from __future__ import annotations

import re

from browser import Visit, answer_of
from playwright.sync_api import Browser, Response, Route, expect

MOST_BYTES = 400_000


def test_the_first_load_is_small_and_has_no_mathematics(browser: Browser, server_url: str) -> None:
    visit = Visit(browser, server_url)
    responses: list[Response] = []
    visit.page.on("response", lambda response: responses.append(response))
    visit.open()
    visit.page.wait_for_load_state("networkidle")
    loaded = {each.url: len(each.body()) for each in responses}
    visit.close()
    assert len(loaded) > 50
    assert sum(loaded.values()) < MOST_BYTES
    assert not [url for url in loaded if "katex" in url or "highlight.js" in url]


def test_one_can_type_at_once(visit: Visit) -> None:
    page = visit.page
    page.keyboard.type("Hello?")
    expect(page.locator(".composer textarea")).to_have_value("Hello?")
    page.keyboard.press("Enter")
    expect(page.locator(".numbers-line")).to_be_visible()
    page.keyboard.press("Alt+n")
    page.keyboard.type("Again?")
    expect(page.locator(".composer textarea")).to_have_value("Again?")


def test_an_example_is_asked_with_one_click_and_leads_on(visit: Visit) -> None:
    page = visit.page
    page.locator(".example", has_text="What color is the star?").click()
    expect(page.locator(".markdown")).to_have_text("The star is red.")
    expect(page.locator(".question img")).to_have_js_property("naturalWidth", 240)
    legend = page.locator(".turn .legend")
    expect(legend).to_contain_text(re.compile(r"computed: \d+ tokens"))
    page.locator(".offer", has_text="Where is the triangle?").click()
    expect(page.locator(".markdown").nth(1)).to_have_text("The triangle is at the top right.")
    expect(legend.nth(1)).to_contain_text(re.compile(r"reused from memory: \d+ tokens"))
    expect(page.locator(".offer")).to_have_text(["What color is the circle?"])
    page.keyboard.press("Alt+n")
    visit.upload("shapes.png")  # the reader's own, of which nothing is known
    visit.ask("What is it?")
    expect(page.locator(".offer")).to_have_count(0)
    page.keyboard.press("Alt+n")
    page.locator(".example", has_text="What happens?").click()
    expect(page.locator(".markdown")).to_contain_text("circle")
    expect(page.locator(".question video")).to_be_visible()


def test_a_model_that_sees_nothing_is_offered_no_pictures(visit: Visit) -> None:
    page = visit.page

    def blind(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"has_image_understanding": False})

    page.route("**/get_model_info", blind)
    page.reload()
    expect(page.locator(".welcome")).to_contain_text("This model reads text alone.")
    expect(page.locator(".example")).to_have_count(0)
    page.locator(".examples button").first.click()
    expect(page.locator(".numbers-line")).to_be_visible()
    assert answer_of(page, 0)


FIELD = re.compile(r"\b[a-z]+_[a-z_]+\b")


def test_no_view_shows_the_name_of_a_field(visit: Visit) -> None:
    page = visit.page
    visit.upload("shapes.png")
    visit.ask("What color is the star?")
    page.locator(".reuse-of summary").click()
    page.get_by_role("button", name="Options").click()
    shown = [page.locator("body").inner_text()]
    page.keyboard.press("Escape")
    for view in ("reuse", "live"):
        visit.open(view)
        page.locator("main:visible h1").wait_for()
        if view == "live":
            page.locator(".meters").wait_for()
        shown.append(page.locator("body").inner_text())
    assert FIELD.findall("\n".join(shown)) == []


def test_keys_do_what_the_list_says(visit: Visit) -> None:
    page = visit.page
    box = page.locator(".composer textarea")
    visit.ask("One?")
    page.get_by_role("button", name="Keyboard shortcuts").click()
    expect(page.get_by_role("dialog")).to_contain_text("begin a new conversation")
    page.keyboard.press("Alt+n")  # nothing behind a dialog
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.locator(".turn")).to_have_count(1)
    page.keyboard.press("Alt+3")
    expect(page.locator("main.live")).to_be_visible()
    page.keyboard.press("Control+k")
    expect(page.get_by_label("Search the conversations")).to_be_focused()
    page.keyboard.press("Escape")
    expect(box).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(box).to_have_value("One?")
    page.keyboard.press("Escape")
    expect(box).to_have_value("")
    expect(page.get_by_role("button", name="Leave it as it was")).to_be_hidden()
    page.keyboard.press("Alt+2")
    expect(page.locator("main.reuse")).to_be_visible()
    page.keyboard.press("Alt+1")
    expect(page.locator(".turn")).to_have_count(1)
    page.keyboard.press("Alt+n")
    expect(page.locator(".turn")).to_have_count(0)
