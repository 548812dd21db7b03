"""Reasoning and tool calls out of a stream of text, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_texts import TOOLS, cuts

from vlm_serve.server.output_parser import OutputParser
from vlm_serve.server.pieces import Piece

CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


def parse(pieces: list[str], **options: Any) -> dict[str, Any]:
    parser = OutputParser(**options)
    found = [piece for text in pieces for piece in parser.feed(text)] + parser.finish()
    calls: dict[int, list[str]] = {}
    for piece in found:
        if piece.kind == "tool_name":
            calls[piece.call] = [piece.text, ""]
        elif piece.kind == "tool_arguments":
            calls[piece.call][1] += piece.text
    return {
        "content": "".join(piece.text for piece in found if piece.kind == "content"),
        "reasoning": "".join(piece.text for piece in found if piece.kind == "reasoning"),
        "calls": [(name, json.loads(arguments)) for name, arguments in calls.values()],
    }


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("plain text", {}, {"content": "plain text", "reasoning": "", "calls": []}),
    (CALL, {}, {"content": CALL, "reasoning": "", "calls": []}),
    (
        "I think\n</think>\n\nParis.",
        {"reasoning": True},
        {"content": "Paris.", "reasoning": "I think", "calls": []},
    ),
    (
        "<think>\nI think\n</think>\n\nParis.",
        {"reasoning": False},
        {"content": "Paris.", "reasoning": "I think", "calls": []},
    ),
    (
        "no thought <think>here</think>",
        {"reasoning": False},
        {"content": "no thought <think>here</think>", "reasoning": "", "calls": []},
    ),
    ("never ends", {"reasoning": True}, {"content": "", "reasoning": "never ends", "calls": []}),
    ("<thin", {"reasoning": False}, {"content": "<thin", "reasoning": "", "calls": []}),
    (
        "Let me see.\n\n" + CALL,
        {"tools": TOOLS},
        {
            "content": "Let me see.",
            "reasoning": "",
            "calls": [("get_weather", {"city": "Paris", "days": 3})],
        },
    ),
    (
        CALL + "\n" + CALL + "\n<tool_call>\n<function=stop>\n</function>\n</tool_call>",
        {"tools": TOOLS},
        {
            "content": "",
            "reasoning": "",
            "calls": [("get_weather", {"city": "Paris", "days": 3})] * 2 + [("stop", {})],
        },
    ),
    (
        "why\n</think>\n\n" + CALL,
        {"tools": TOOLS, "reasoning": True},
        {
            "content": "",
            "reasoning": "why",
            "calls": [("get_weather", {"city": "Paris", "days": 3})],
        },
    ),
    (  # only the end of the block is missing
        CALL[: CALL.index("\n</tool_call>")],
        {"tools": TOOLS},
        {"content": "", "reasoning": "", "calls": [("get_weather", {"city": "Paris", "days": 3})]},
    ),
    (  # an unknown function is no call
        "<tool_call>\n<function=rm>\n</function>\n</tool_call>",
        {"tools": TOOLS},
        {
            "content": "<tool_call>\n<function=rm>\n</function>\n</tool_call>",
            "reasoning": "",
            "calls": [],
        },
    ),
    (
        "a < b and <tool_box> too",
        {"tools": TOOLS},
        {"content": "a < b and <tool_box> too", "reasoning": "", "calls": []},
    ),
    (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\ntwo\nlines <b>\n</parameter>\n"
        "<parameter=city>\nagain\n</parameter>\n</function>\n</tool_call>",
        {"tools": TOOLS},
        {"content": "", "reasoning": "", "calls": [("get_weather", {"city": "two\nlines <b>"})]},
    ),
]


@pytest.mark.parametrize(("text", "options", "wanted"), CASES)
def test_the_result_does_not_depend_on_how_the_text_is_cut(
    text: str, options: dict[str, Any], wanted: dict[str, Any]
) -> None:
    assert parse([text], **options) == wanted
    assert parse(list(text), **options) == wanted
    for seed in range(50):
        assert parse(cuts(text, seed), **options) == wanted


@given(st.lists(st.sampled_from([*"ab <>\n", "<tool_call>", "</tool_call>", "</think>", "<thi"])))
def test_any_text_is_parsed_alike_in_any_cut(parts: list[str]) -> None:
    text = "".join(parts)
    for options in ({}, {"tools": TOOLS}, {"reasoning": True}, {"reasoning": True, "tools": TOOLS}):
        assert parse(list(text), **options) == parse([text], **options)


@given(st.text(alphabet="ab <>\n"))
def test_text_without_markers_is_not_changed(text: str) -> None:
    assert parse(list(text), tools=TOOLS)["content"] == text


def test_text_is_released_as_soon_as_it_is_certain() -> None:
    parser = OutputParser(tools=TOOLS)
    assert parser.feed("abc") == [Piece("content", "abc")]
    assert parser.feed(" ") == []
    assert parser.feed("d<") == [Piece("content", " d")]
    assert parser.feed("e") == [Piece("content", "<e")]


def test_a_call_is_announced_before_its_arguments() -> None:
    parser = OutputParser(tools=TOOLS)
    head, rest = CALL.split("<parameter=days>")
    name, city = parser.feed(head)
    assert name == Piece("tool_name", "get_weather", 0)
    assert city == Piece("tool_arguments", '{"city": "Paris"', 0)
    days, close = parser.feed("<parameter=days>" + rest)
    assert days == Piece("tool_arguments", ', "days": 3', 0)
    assert close == Piece("tool_arguments", "}", 0)
