"""Tools and an answer that calls one, for the tests of several routes and of parsers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from vlm_serve.server.answers.call_reader import CallReader, Mark
from vlm_serve.server.answers.output_parser import OutputParser

CALL = (
    "Let me look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
CITY_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "wind": {"type": "boolean"},
        "where": {"type": "object"},
        "maybe": {"type": ["string", "null"]},
        "free": {},
    },
}
FILE = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
}
TOOLS: dict[str, Any] = {"get_weather": WEATHER, "stop": {}, "write_file": FILE}


def cuts(text: str, seed: int) -> list[str]:
    """A text in a few pieces."""
    rng = random.Random(seed)
    marks = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 12)))
    return [text[a:b] for a, b in zip([0, *marks], [*marks, len(text)], strict=True)]


def told(pieces: list[str], *, cut: bool = False, **options: Any) -> dict[str, Any]:
    """What a parser tells of an answer that comes in these pieces: the texts, and every call's name
    and arguments as written."""
    parser = OutputParser(**options)
    found = [piece for text in pieces for piece in parser.feed(text)] + parser.finish(cut=cut)
    calls: dict[int, list[str]] = {}
    for piece in found:
        if piece.kind == "tool_name":
            calls[piece.call] = [piece.text, ""]
        elif piece.kind == "tool_arguments":
            calls[piece.call][1] += piece.text
    texts = {
        kind: "".join(piece.text for piece in found if piece.kind == kind)
        for kind in ("content", "reasoning")
    }
    return texts | {"calls": [(name, arguments) for name, arguments in calls.values()]}


def read_of(monkeypatch: pytest.MonkeyPatch, reader: type[CallReader]) -> list[int]:
    """The sizes of what readers read from now on."""
    read: list[int] = []
    text, mark = reader._text, reader._mark

    def count_text(self: CallReader, plain: str) -> Any:
        read.append(len(plain))
        return text(self, plain)

    def count_mark(self: CallReader, found: Mark) -> Any:
        read.append(len(found.text))
        return mark(self, found)

    monkeypatch.setattr(reader, "_text", count_text)
    monkeypatch.setattr(reader, "_mark", count_mark)
    return read


def is_unfinished(text: str, *, cut: bool = False, **options: Any) -> bool:
    """Return True if a parser reports a call of an unfinished answer."""
    parser = OutputParser(**options)
    parser.feed(text)
    parser.finish(cut=cut)
    return parser.unfinished


def told_alike(text: str, *, cut: bool = False, **options: Any) -> dict[str, Any]:
    """What is told of a whole answer, and of the same in two pieces, wherever they meet, and one
    character at a time."""
    whole = told([text], cut=cut, **options)
    assert told(list(text), cut=cut, **options) == whole
    for at in range(1, len(text)):
        assert told([text[:at], text[at:]], cut=cut, **options) == whole, text[:at]
    return whole
