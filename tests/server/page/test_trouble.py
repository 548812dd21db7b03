"""What the page does when the server refuses, goes, or comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import MEDIA, SMALL_SERVER, Visit, answer_of
from playwright.sync_api import Browser, Route, expect
from ports import free_port
from server_process import server_process

KEY = "a-key-that-is-right"


@pytest.fixture(scope="module")
def guarded_url() -> Iterator[str]:
    with server_process(*SMALL_SERVER, "--api-key", KEY) as server:
        yield server.url


@pytest.fixture
def guarded(browser: Browser, guarded_url: str) -> Iterator[Visit]:
    visit = Visit(browser, guarded_url)
    visit.open()
    yield visit
    visit.close()
    assert visit.strangers == []


def give_key(visit: Visit, key: str) -> None:
    dialog = visit.page.get_by_role("dialog")
    dialog.get_by_label("Key").fill(key)
    dialog.get_by_role("button", name="Use this key").click()


def test_a_wrong_key_is_told_and_a_right_one_opens(guarded: Visit) -> None:
    page = guarded.page
    give_key(guarded, "wrong")
    expect(page.get_by_role("dialog").get_by_role("alert")).to_have_text(
        "The server does not accept this key."
    )
    give_key(guarded, KEY)
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.locator(".server-state")).to_be_empty()
    guarded.ask("Hello?")
    assert answer_of(page, 0)
    unauthorised = [error for error in guarded.errors if "401" not in error]
    assert unauthorised == []


def test_without_a_key_the_page_says_what_is_missing(guarded: Visit) -> None:
    page = guarded.page
    page.get_by_role("button", name="Close").click()
    guarded.ask("Hello?")
    expect(page.locator(".answer .problem")).to_be_visible()
    expect(page.locator(".server-state")).to_contain_text("The server requires an API key.")
    page.get_by_role("button", name="Enter a key").click()
    give_key(guarded, KEY)
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".numbers-line")).to_be_visible()


def test_a_key_that_no_header_can_carry_is_a_wrong_one(guarded: Visit) -> None:
    give_key(guarded, "ключ\n")
    expect(guarded.page.get_by_role("dialog").get_by_role("alert")).to_be_visible()


def test_the_key_is_kept_for_the_tab_alone(guarded: Visit) -> None:
    """It is in the session storage; not in what lasts, an export, a command or an address."""
    page = guarded.page
    give_key(guarded, KEY)
    guarded.choose(MEDIA / "star.png")
    guarded.ask("What is it?")
    page.reload()
    guarded.ask("And again?")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export as JSON").click()
    assert KEY not in Path(download.value.path()).read_text()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=guarded.url)
    page.get_by_role("button", name="Copy as a curl command").click()
    expect(page.locator(".notice")).to_contain_text("on the clipboard")
    command = page.evaluate("() => navigator.clipboard.readText()")
    assert KEY not in command
    assert "Authorization: Bearer $VLM_SERVE_KEY" in command
    state = page.context.storage_state(indexed_db=True)
    assert "And again?" in json.dumps(state)
    assert KEY not in json.dumps(state)
    assert KEY not in page.url
    assert page.evaluate("() => Object.values({...sessionStorage}).length") == 2
    other = guarded.tab()
    guarded.open(page=other)
    expect(other.get_by_role("dialog")).to_be_visible()


def test_a_server_that_goes_and_comes_back(browser: Browser) -> None:
    """The question stays, the page says what is wrong, and finds the server again by itself."""
    port = free_port()
    with server_process(*SMALL_SERVER, port=port) as server:
        visit = Visit(browser, server.url)
        visit.open()
        visit.ask("Hello?")
        first = answer_of(visit.page, 0)
    page = visit.page
    visit.ask("Are you there?")
    expect(page.locator(".answer .problem")).to_have_text("The server does not answer.")
    state = page.locator(".server-state")
    expect(state).to_contain_text("Trying again")
    with server_process(*SMALL_SERVER, port=port):
        expect(state).to_be_empty()
        page.get_by_role("button", name="Ask again").last.click()
        expect(page.locator(".answer .problem")).to_have_count(0)
        expect(page.locator(".numbers-line")).to_have_count(2)
        assert answer_of(page, 0) == first
    visit.close()
    assert all("ERR_CONNECTION" in error or "ERR_EMPTY" in error for error in visit.errors)


def test_a_stream_that_breaks_keeps_what_has_come(browser: Browser) -> None:
    with server_process(*SMALL_SERVER) as server:
        visit = Visit(browser, server.url)
        visit.open()

        def endless(route: Route) -> None:
            body = json.loads(route.request.post_data or "") | {
                "ignore_eos": True,
                "max_tokens": 3000,
            }
            route.continue_(post_data=json.dumps(body))

        visit.page.route("**/v1/chat/completions", endless)
        visit.ask("Hello?", wait=False)
        expect(visit.page.locator(".markdown p").first).not_to_be_empty()
        server.process.kill()
        expect(visit.page.locator(".answer .problem")).to_have_text("The server does not answer.")
        assert answer_of(visit.page, 0)
    visit.close()
