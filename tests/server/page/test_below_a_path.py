"""The page works below a path of a proxy: it asks nothing of the host itself."""

from __future__ import annotations

from browser import SMALL_SERVER, Visit, answer_of
from page_checks import saying
from playwright.sync_api import Browser, Route, expect
from server_process import server_process


def use(visit: Visit) -> None:
    """What asks for something: an example, an answer, a formula, code, and events."""
    page = visit.page
    page.locator(".example").first.click()
    expect(page.locator(".numbers-line")).to_be_visible()
    assert answer_of(page, 0)
    page.route("**/v1/chat/completions", saying(content="$x$\n\n```py\nreturn 1\n```"))
    visit.ask("A formula?")
    expect(page.locator(".katex")).to_be_visible()
    expect(page.locator(".code-keyword")).to_be_visible()
    visit.open("live")
    expect(page.locator(".treegrid .rows [role=row]").first).to_be_visible()
    assert (visit.errors, visit.strangers) == ([], [])


def test_every_request_stays_below_the_path(browser: Browser) -> None:
    with server_process(*SMALL_SERVER, "--root-path", "/a/vlm") as server:
        visit = Visit(browser, f"{server.url}/a/vlm")
        visit.page.goto(visit.url)  # leads to the address with a slash
        assert visit.page.url.startswith(f"{visit.url}/")
        visit.open()
        use(visit)
        visit.close()


def test_a_proxy_may_take_its_path_off(browser: Browser, server_url: str) -> None:
    def pass_on(route: Route) -> None:
        if route.request.url.endswith("/v1/cache/events"):
            route.continue_(url=route.request.url.replace("/deep/down", "", 1))  # has no end
        else:
            url = route.request.url.replace("/deep/down", "", 1)
            route.fulfill(response=route.fetch(url=url))

    visit = Visit(browser, f"{server_url}/deep/down")
    visit.context.route("**/deep/down/**", pass_on)
    visit.open()
    use(visit)
    visit.close()
