"""A headless Chromium that visits the page, for tests, screenshots and benchmarks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    FilePayload,
    Page,
    Request,
    expect,
    sync_playwright,
)

MEDIA = Path(__file__).resolve().parent.parent / "examples" / "media"
WAIT_MS = 60_000
SMALL_SERVER = (
    *("demo", "--device", "cpu", "--cache-memory", "32MiB", "--threads", "1"),
    *("--speculative", "off"),  # so that long answers take their time
)


NEEDED = "tests of the page need the program chromium (Debian: apt-get install chromium)"


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium, or whichever stands under that name in the path.

    Raises FileNotFoundError if there is none.
    """
    path = shutil.which("chromium")
    if path is None:
        raise FileNotFoundError(NEEDED)
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """One browser profile with the page open, and what the page did besides.

    Attributes:
        page: the tab.
        errors: what the console said as an error, and what nobody caught.
        strangers: addresses of other hosts asked for anything.
        streams: requests for the stream of cache events so far.
    """

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.url = url
        self.errors: list[str] = []
        self.strangers: list[str] = []
        self.streams = 0
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(WAIT_MS)
        self.page = self.tab()

    def tab(self) -> Page:
        """A further tab of the same profile; nothing is open in it yet."""
        page = self.context.new_page()
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._asked)
        return page

    def open(self, view: str = "chat", page: Page | None = None) -> None:
        page = page or self.page
        page.goto(f"{self.url}/#{view}")
        page.locator("nav[aria-label=Views] a[aria-current]").wait_for()

    def ask(self, text: str, *, wait: bool = True) -> None:
        """Sends a question; with `wait`, until its answer is complete."""
        answers = self.page.locator(".turn").count()
        self.page.get_by_label("Question", exact=True).locator("visible=true").last.fill(text)
        self.page.get_by_role("button", name="Send").click()
        if wait:
            self.page.locator(".turn").nth(answers).locator("[aria-busy=false]").wait_for()
            self.page.get_by_role("button", name="Send").wait_for()

    def upload(self, *names: str) -> None:
        """Chooses files of examples/media."""
        for name in names:
            self.choose(MEDIA / name)

    def choose(self, file: Path | FilePayload) -> None:
        attached = self.page.locator(".attachment").count()
        self.page.get_by_label("Pictures, videos and texts", exact=True).set_input_files(file)
        expect(self.page.locator(".attachment")).to_have_count(attached + 1)

    def close(self) -> None:
        self.context.close()

    def _said(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def _asked(self, request: Request) -> None:
        address = urlsplit(request.url)
        if address.scheme in ("http", "https") and not request.url.startswith(self.url):
            self.strangers.append(request.url)
        self.streams += address.path == "/v1/cache/events"


def answer_of(page: Page, turn: int) -> str:
    """The text of an answer."""
    return page.locator(".turn").nth(turn).locator(".markdown").inner_text()


def reuse_of(page: Page, turn: int) -> str:
    """The line of numbers under an answer."""
    return page.locator(".turn").nth(turn).locator(".numbers-line").inner_text()
