"""Pictures of every view of the page, for the README and the docs: make screenshots.

A real server with the demo model answers; nothing in them is drawn by hand.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import httpx
from browser import SMALL_SERVER, Visit, chromium
from playwright.sync_api import Browser
from server_process import server_process

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "screenshots"
SIZES = {1280: 800, 380: 740}
# Several conversations, so that the cache has branches.
TALKS = (
    (("star.png", "heart.png"), ("Which picture has the star?", "Which picture has the heart?")),
    (("change.mp4",), ("What happens?", "What color is the circle at the start?")),
    ((), ("Who drew this?",)),
    (("shapes.png",), ("Where is the circle?",)),
    (("shapes.png",), ("What color is the star?", "Where is the triangle?")),
)


def fill(visit: Visit) -> None:
    for files, questions in TALKS:
        visit.page.get_by_role("button", name="New conversation").click()
        visit.upload(*files)
        for question in questions:
            visit.ask(question)


def some_traffic(url: str) -> None:
    """Questions from elsewhere for as long as the lines of the last minutes need."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        for number in range(24):
            question = f"How many stars are there{' really' * (number % 5)}?"
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": 8}
            client.post("/v1/chat/completions", json=body).raise_for_status()
            time.sleep(0.5 if number % 8 < 5 else 1.2)


def take(browser: Browser, url: str, scheme: str, width: int) -> None:
    wide = {"width": max(SIZES), "height": SIZES[max(SIZES)]}
    visit = Visit(browser, url, color_scheme=scheme, viewport=wide, reduced_motion="reduce")
    visit.open()
    fill(visit)
    visit.page.set_viewport_size({"width": width, "height": SIZES[width]})
    for view in ("chat", "reuse", "live"):
        visit.open(view)
        if view == "chat":
            visit.page.locator(".reuse-of summary").last.click()
            visit.page.locator(".thread").evaluate("(thread) => { thread.scrollTop = 1e6 }")
        if view == "live":
            visit.page.locator(".meters").wait_for()
            visit.page.get_by_role("treegrid").get_by_text("picture").first.click()
            some_traffic(url)
            visit.page.locator(".live").evaluate("(view) => view.scrollTo(0, 0)")
        visit.page.mouse.move(0, 0)
        visit.page.wait_for_timeout(300)
        path = FOLDER / f"{view}-{width}-{scheme}.png"
        visit.page.screenshot(path=path)
        print(f"{path.name}: {path.stat().st_size // 1024} KiB")
    visit.close()
    assert not visit.errors, visit.errors


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for scheme in ("light", "dark"):
            for width in SIZES:
                with server_process(*SMALL_SERVER) as server:
                    take(browser, server.url, scheme, width)
    return 0


if __name__ == "__main__":
    sys.exit(main())
