"""What axe-core says of the page, and models that say what a test wants."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, Route, ViewportSize

AXE = Path(__file__).parent.joinpath("server/page/axe.min.js").read_text(encoding="utf-8")
SMALL: ViewportSize = {"width": 380, "height": 740}
LARGE: ViewportSize = {"width": 1280, "height": 800}
CHECK = "async () => { const told = await axe.run(); return JSON.stringify(told.violations); }"


def violations(page: Page) -> list[str]:
    """What axe-core objects to, where it is serious."""
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(AXE)
    told = json.loads(page.evaluate(CHECK))
    return [
        f"{each['id']}: {each['help']}: {each['nodes'][0]['html']}"
        for each in told
        if each["impact"] in ("serious", "critical")
    ]


def fits(page: Page) -> bool:
    """Whether nothing is wider than the screen."""
    return bool(page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"))


def saying(**delta: Any) -> Callable[[Route], None]:
    """A model that says this, whatever it is asked."""
    chunks = [
        {"model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"model": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ]
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
    headers = {"content-type": "text/event-stream"}
    return lambda route: route.fulfill(status=200, headers=headers, body="".join(events))
