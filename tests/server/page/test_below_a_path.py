"""The page works below a path of a proxy: it asks nothing of the host itself."""

from __future__ import annotations

from browser import SMALL_SERVER, Visit, answer_of
from playwright.sync_api import Browser, expect
from server_process import server_process


def test_every_request_stays_below_the_path(browser: Browser) -> None:
    with server_process(*SMALL_SERVER, "--root-path", "/a/vlm") as server:
        visit = Visit(browser, f"{server.url}/a/vlm")
        visit.open()
        visit.ask("hi")
        assert answer_of(visit.page, 0)
        visit.open("cache")
        expect(visit.page.get_by_text("The server does not answer.")).to_have_count(0)
        assert (visit.errors, visit.strangers) == ([], [])
        visit.close()
