"""What the tests of `vlm-serve eval` share: the samples, and reading a report."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from vlm_serve.cli import main


class Page(HTMLParser):
    """The words of a page, and its elements with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "rect", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


@pytest.fixture
def read_page() -> type[Page]:
    return Page


Reports = Callable[..., tuple[int, dict[str, Any], Page]]


@pytest.fixture
def evaluated(tmp_path: Path) -> Reports:
    """Runs the command; its exit status and both of its reports."""

    def run(*arguments: str) -> tuple[int, dict[str, Any], Page]:
        output = tmp_path / "report.html"
        status = main(["eval", *arguments, "--cache-memory", "64MiB", "-o", str(output)])
        report = json.loads(output.with_suffix(".json").read_text(encoding="utf-8"))
        return status, report, Page(output.read_text(encoding="utf-8"))

    return run


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """All tests of this folder compute on one thread."""
