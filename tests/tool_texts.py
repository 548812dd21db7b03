"""Tools and an answer that calls one, for the tests of several routes and of parsers."""

from __future__ import annotations

import random
from typing import Any

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
TOOLS: dict[str, Any] = {"get_weather": WEATHER, "stop": {}}


def cuts(text: str, seed: int) -> list[str]:
    """A text in a few pieces."""
    rng = random.Random(seed)
    marks = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 12)))
    return [text[a:b] for a, b in zip([0, *marks], [*marks, len(text)], strict=True)]
