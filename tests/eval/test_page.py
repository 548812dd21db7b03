"""The page of a report: complete by itself, and its charts show its figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from vlm_serve.eval.comparing import compare
from vlm_serve.eval.page import Bars, draw, page, shown
from vlm_serve.eval.replies import AnswerRun, Reply, TokenCounts, TurnAnswer
from vlm_serve.eval.report import Subject, make_report, status_of


def run(texts: list[str], cached: int, seconds: float) -> AnswerRun:
    replies = tuple(
        Reply(
            f"item {number}",
            (TurnAnswer(text, "stop", (number,)),),
            chosen=text,
            expected="yes",
            right=text == "yes",
            groups=("even" if number % 2 == 0 else "odd",),
            tokens=TokenCounts(1000, cached, 5),
        )
        for number, text in enumerate(texts)
    )
    return AnswerRun(replies, seconds, TokenCounts.sum(reply.tokens for reply in replies))


@pytest.fixture
def report(tmp_path: Path) -> dict[str, Any]:
    texts = ["yes", "no", "yes"]
    first = compare("first, greedy", "A note.", run(texts, 0, 2.0), run(texts, 0, 2.5))
    second = compare("second & last", "Another.", run(texts, 750, 1.0), run(texts, 0, 4.0))
    subject = Subject("A test", "demo", tmp_path / "none.json", {"max_tokens": 5})
    return make_report(subject, [first, second])


def test_figures_are_summed(report: dict[str, Any]) -> None:
    assert status_of(report) == 0
    assert report["verdict"] == "All 6 answers are the same with and without prefix caching."
    second = report["parts"][1]
    assert second["with_caching"] == {
        "seconds": 1.0,
        "prompt_tokens": 3000,
        "cached_tokens": 2250,
        "computed_tokens": 750,
        "generated_tokens": 15,
        "hit_rate": 0.75,
    }
    assert second["without_caching"]["computed_tokens"] == 3000
    assert second["accuracy"] == {
        "all": {"right": 2, "of": 3},
        "even": {"right": 2, "of": 2},
        "odd": {"right": 0, "of": 1},
    }


def test_the_page_needs_nothing_else(report: dict[str, Any], read_page: Any) -> None:
    text = page(report)
    found = read_page(text)
    assert found.open == [], "every element is closed"
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in found.elements}
    links = [
        value
        for _, attributes in found.elements
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "style")
    ]
    assert links == []
    assert "http" not in text.replace("http-equiv", "")
    assert "@import" not in text
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text
    assert "color-scheme: light dark" in text


def test_both_schemes_define_every_colour_that_is_used(report: dict[str, Any]) -> None:
    style = page(report).split("<style>")[1].split("</style>")[0]
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    used = set(re.findall(r"var\((--\w+)\)", style))
    assert used
    for part in (light, dark):
        assert used <= set(re.findall(r"(--\w+):", part))
    rest = style.split("}\n}", 1)[1]
    assert not re.findall(r"#[0-9a-f]{3,6}", rest), "other rules name no colours of their own"


def test_the_page_shows_what_the_report_says(report: dict[str, Any], read_page: Any) -> None:
    found = read_page(page(report))
    for said in ("A test: demo", report["verdict"], "second & last", "A note.", "75.0 %"):
        assert said in found.words
    for sentence in report["meaning"]:
        assert sentence in found.words
    assert found.count("svg") == 4
    assert found.count("table") == 3, "the overview, and the answers of both parts"
    spoken = [attributes["aria-label"] for tag, attributes in found.elements if tag == "svg"]
    assert "second & last: with caching 750, without 3 000" in spoken[0]


def widths(svg: str) -> list[float]:
    """Of the bars; those of the legend are squares."""
    found = re.findall(r'<rect [^>]*width="([\d.]+)" height="14"', svg)
    return [float(width) for width in found]


def test_bars_are_as_long_as_their_values() -> None:
    rows = {"one": (50.0, 100.0), "two": (0.0, 25.0)}
    first, second, nothing, last = widths(draw(Bars("Bars", ("a", "b"), rows)))
    assert (first, last) == (second / 2, second / 4)
    assert nothing == 1, "still to be seen"
    full, half = widths(draw(Bars("Shares", ("a",), {"one": (1.0,), "two": (0.5,)}, "%")))
    assert half == full / 2
    assert widths(draw(Bars("Small", ("a",), {"one": (0.5,)}, "%"))) == [half]
    assert widths(draw(Bars("None", ("a",), {"one": (0.0,)}))) == [1]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (12345.0, "", "12 345"),
        (0.5234, "s", "0.52 s"),
        (123.4, "s", "123 s"),
        (3, "", "3"),
        (0.747, "%", "74.7 %"),
    ],
)
def test_values_are_written_for_readers(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text
