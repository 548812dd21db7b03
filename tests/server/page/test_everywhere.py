"""A visit that uses everything, in light and dark, on a small and a large screen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Visit
from page_checks import LARGE, SMALL, fits, saying, violations
from playwright.sync_api import Browser, expect

RICH = r"""Inline $\sqrt{x}$, and as a block:

$$ S_t = S_{t-1}\left(I - \beta_t k_t k_t^\top\right) + \beta_t v_t k_t^\top + a + b + c + d $$

```python
def answer(question: str) -> int:
    return 42  # of course
```
"""
SCREENS = {
    "light, large": ("light", LARGE),
    "dark, large": ("dark", LARGE),
    "light, small": ("light", SMALL),
    "dark, small": ("dark", SMALL),
}


@pytest.fixture(params=list(SCREENS.values()), ids=list(SCREENS))
def screen(request: pytest.FixtureRequest, browser: Browser, server_url: str) -> Iterator[Visit]:
    scheme, size = request.param
    visit = Visit(browser, server_url, color_scheme=scheme, viewport=size)
    visit.open()
    yield visit
    visit.close()
    assert visit.errors == []
    assert visit.strangers == []


def is_fine(visit: Visit) -> bool:
    """Nothing serious is wrong with what is shown now."""
    assert violations(visit.page) == []
    return fits(visit.page)


def show_sidebar(visit: Visit) -> None:
    menu = visit.page.get_by_role("button", name="Conversations")
    if menu.is_visible():
        menu.click()
        visit.page.wait_for_timeout(200)  # it slides in, and is half transparent meanwhile


def test_a_conversation_with_everything(screen: Visit, tmp_path: Path) -> None:
    page = screen.page
    expect(page.locator(".composer textarea")).to_be_focused()
    assert is_fine(screen)

    page.locator(".example").first.click()
    expect(page.locator(".turn .legend")).to_contain_text("picture or video")
    expect(page.locator(".offer")).to_have_count(2)
    assert is_fine(screen)

    page.get_by_role("button", name="Edit this question").click()
    expect(page.get_by_role("button", name="Leave it as it was")).to_be_visible()
    assert is_fine(screen)
    page.locator(".composer textarea").fill("What color is the circle?")
    page.keyboard.press("Enter")
    expect(page.locator(".versions")).to_contain_text("2 of 2")
    expect(page.locator(".numbers-line")).to_be_visible()
    assert is_fine(screen)

    notes = tmp_path / "a rather long name of a file with notes.txt"
    notes.write_text("The key is under the mat.", encoding="utf-8")
    screen.choose(notes)
    page.get_by_label("Pictures, videos and texts").set_input_files(
        {"name": "tool.zip", "mimeType": "application/zip", "buffer": b"PK\0\x03"}
    )
    expect(page.locator(".notice")).to_contain_text("tool.zip is neither a picture")
    assert is_fine(screen)

    page.route("**/v1/chat/completions", saying(content=RICH))
    screen.ask("A formula and code?")
    expect(page.locator(".katex-display")).to_be_visible()
    expect(page.locator(".code-keyword").first).to_be_visible()
    assert is_fine(screen)

    page.keyboard.press("Control+/")
    expect(page.get_by_role("dialog")).to_contain_text("Keyboard shortcuts")
    assert is_fine(screen)
    page.keyboard.press("Escape")

    show_sidebar(screen)
    page.get_by_label("Search the conversations").fill("circle")
    expect(page.locator(".sidebar .open")).to_have_count(1)
    assert is_fine(screen)
    page.locator(".sidebar .open").hover()
    page.get_by_role("button", name="Rename What color is the circle?").click()
    assert is_fine(screen)
    page.keyboard.press("Escape")


def test_the_live_view_with_a_past(screen: Visit) -> None:
    screen.ask("Something that leaves a trace in the history of the server.")
    screen.open("live")
    expect(screen.page.locator(".feed li").first).to_be_visible()
    expect(screen.page.locator(".gauges")).to_be_visible()
    assert is_fine(screen)
