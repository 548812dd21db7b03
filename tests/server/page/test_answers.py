"""What may be done with an answer: continue, copy and save it, and enlarge a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from browser import Visit, answer_of
from page_checks import LARGE, SMALL, fits, saying, violations
from playwright.sync_api import Page, Route, expect


def limited_to(tokens: int) -> Any:
    """The same request for an answer of so many tokens."""

    def limited(route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        body |= {"max_tokens": tokens, "ignore_eos": True}
        route.continue_(post_data=json.dumps(body))

    return limited


def go_on(page: Page) -> dict[str, Any]:
    """Clicks Continue; returns the request's body when the answer has come."""
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Continue").click()
    expect(page.locator(".answer").last).to_have_attribute("aria-busy", "false")
    page.get_by_role("button", name="Send").wait_for()
    body = asked.value.post_data_json
    assert isinstance(body, dict)
    return body


def test_an_answer_that_reached_its_length_goes_on(visit: Visit) -> None:
    page = visit.page
    page.route("**/v1/chat/completions", limited_to(2))
    visit.upload("shapes.png")
    visit.ask("What color is the star?")
    expect(page.locator(".answer .note")).to_have_text("The answer reached its maximum length.")
    begun = answer_of(page, 0)
    page.reload()
    body = go_on(page)
    assert body["continue_final_message"] is True
    assert body["messages"][-1] == {"role": "assistant", "content": begun}
    page.unroute("**/v1/chat/completions")
    go_on(page)
    assert answer_of(page, 0) == "The star is red."
    expect(page.locator(".answer .note")).to_have_count(0)
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)
    visit.ask("Where is the triangle?")
    assert answer_of(page, 1) == "The triangle is at the top right."


def test_an_answer_that_was_stopped_goes_on(visit: Visit) -> None:
    page = visit.page
    page.route("**/v1/chat/completions", limited_to(3000))
    visit.ask("Hello?", wait=False)
    expect(page.locator(".markdown p").first).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".answer .note")).to_have_text("Stopped.")
    begun = answer_of(page, 0)
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", limited_to(4))
    go_on(page)
    assert answer_of(page, 0).startswith(begun.strip()[:20])
    expect(page.locator(".answer .note")).to_have_text("The answer reached its maximum length.")
    visit.ask("And?")
    # What has an answer below it is not continued any more.
    expect(page.locator(".turn").first.get_by_role("button", name="Continue")).to_be_hidden()


def broken(**delta: Any) -> Any:
    """A model whose answer breaks off after this."""
    chunk = {"model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    error = {"error": {"message": "The engine has stopped."}}
    text = f"data: {json.dumps(chunk)}\n\ndata: {json.dumps(error)}\n\n"
    headers = {"content-type": "text/event-stream"}
    return lambda route: route.fulfill(status=200, headers=headers, body=text)


def test_an_answer_that_an_error_ended_goes_on(visit: Visit) -> None:
    page = visit.page
    page.route("**/v1/chat/completions", broken(content="The star "))
    visit.ask("What color is it?")
    expect(page.locator(".answer .problem")).to_have_text("The engine has stopped.")
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", saying(content="is red."))
    go_on(page)
    assert answer_of(page, 0) == "The star is red."
    expect(page.locator(".answer .problem")).to_have_count(0)


def test_asking_again_keeps_an_answer_that_an_error_ended(visit: Visit) -> None:
    page = visit.page
    page.route("**/v1/chat/completions", broken(content="The star "))
    visit.ask("What color is it?")
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".versions")).to_contain_text("2 of 2")
    page.get_by_role("button", name="Send").wait_for()
    page.get_by_role("button", name="Earlier version").click()
    assert answer_of(page, 0) == "The star"


def test_a_thought_goes_on(visit: Visit) -> None:
    page = visit.page
    page.route("**/v1/chat/completions", broken(reasoning="Let me see. "))
    visit.ask("What color is it?")
    page.unroute("**/v1/chat/completions")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Continue").click()
    body = asked.value.post_data_json
    assert isinstance(body, dict)
    last = {"role": "assistant", "content": None, "reasoning": "Let me see. "}
    assert body["messages"][-1] == last
    expect(page.locator(".answer")).to_have_attribute("aria-busy", "false")
    expect(page.locator(".answer .problem")).to_have_count(0)
    expect(page.locator(".folded pre")).to_contain_text("Let me see. ")


def test_half_a_call_is_not_continued(visit: Visit) -> None:
    call = {"index": 0, "id": "c", "function": {"name": "weather", "arguments": '{"pl'}}
    visit.page.route("**/v1/chat/completions", broken(tool_calls=[call]))
    visit.ask("How is it outside?")
    expect(visit.page.locator(".answer .problem")).to_be_visible()
    expect(visit.page.get_by_role("button", name="Continue")).to_have_count(0)


CODE = "Run this:\n\n```sh\nmake serve\n```\n\n$$ x^2 $$\n"


def test_every_copy_has_its_own_name_and_icon(visit: Visit) -> None:
    page = visit.page
    page.route("**/v1/chat/completions", saying(content=CODE))
    visit.ask("How?")
    expect(page.locator(".katex-display")).to_be_visible()
    buttons = page.locator("button[aria-label^=Copy]")
    told = buttons.evaluate_all(
        "(all) => all.map((one) => [one.ariaLabel, one.querySelector('path').getAttribute('d')])"
    )
    assert sorted(name for name, _ in told) == [
        "Copy as a curl command",
        "Copy this answer",
        "Copy this code",
        "Copy this formula as TeX",
    ]
    assert len({path for _, path in told}) == len(told)
    expect(page.get_by_role("button", name="Copy as a curl command")).to_have_text("curl")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=visit.url)
    page.get_by_role("button", name="Copy this answer").click()
    assert page.evaluate("() => navigator.clipboard.readText()") == CODE


def test_an_answer_is_saved_as_markdown(visit: Visit) -> None:
    page = visit.page
    page.route("**/v1/chat/completions", saying(content=CODE))
    visit.ask("How is it run?")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save this answer as Markdown").click()
    assert download.value.suggested_filename == "How-is-it-run-.md"
    assert Path(download.value.path()).read_text(encoding="utf-8") == CODE


def test_a_picture_is_enlarged_by_a_click_and_by_keyboard(visit: Visit) -> None:
    page = visit.page
    visit.upload("shapes.png")
    visit.ask("What color is the star?")
    for size in (LARGE, SMALL):
        page.set_viewport_size(size)
        small = page.locator(".question img").bounding_box()
        page.locator(".question img").click()
        dialog = page.get_by_role("dialog")
        large = dialog.get_by_role("img", name="shapes.png")
        expect(large).to_be_in_viewport(ratio=1)
        shown = large.bounding_box()
        assert small and shown
        assert min(shown["width"], shown["height"]) > min(small["width"], small["height"]) * 1.2
        assert fits(page)
        assert violations(page) == []
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        opener = page.get_by_role("button", name="Enlarge shapes.png")
        expect(opener).to_be_focused()
        page.keyboard.press("Enter")
        large.click()  # closes, as the cross does
        expect(dialog).to_have_count(0)
        expect(opener).to_be_focused()


def test_a_picture_is_enlarged_before_it_is_sent(visit: Visit) -> None:
    visit.upload("star.png")
    visit.page.locator(".attachment").get_by_role("button", name="Enlarge star.png").click()
    expect(visit.page.get_by_role("dialog").get_by_role("img")).to_be_visible()
    visit.page.keyboard.press("Escape")
    expect(visit.page.locator(".attachment")).to_have_count(1)
