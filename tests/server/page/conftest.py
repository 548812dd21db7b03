"""A real Chromium and a real server with the demo model, one of each for a module."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from browser import NEEDED, SMALL_SERVER, Visit, chromium
from playwright.sync_api import Browser
from server_process import server_process

QUICK = "test_the_second_question_about_a_picture_encodes_nothing"
"""The one test with a browser that `make test` runs: a question about a picture, asked twice."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        names = item.fixturenames if isinstance(item, pytest.Function) else ()
        if "browser" in names and item.name != QUICK:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if shutil.which("chromium") is None:
        pytest.skip(NEEDED)
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with server_process(*SMALL_SERVER) as server:
        yield server.url


@pytest.fixture
def visit(browser: Browser, server_url: str) -> Iterator[Visit]:
    """The page in a fresh profile. It may not have said an error, nor asked another host."""
    visit = Visit(browser, server_url)
    visit.open()
    yield visit
    visit.close()
    assert visit.errors == []
    assert visit.strangers == []
