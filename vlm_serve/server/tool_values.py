"""Which white space around a tool call's parameter belongs to its value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SPACE = (" ", "\n", "\r", "\t")


def trim(text: str, schema: Any) -> str:
    """The value in the text between a parameter's tags.

    A line break on either side is the form's. The grammar of an enforced call allows any one white
    space there, and a text need not have any: where a value would break the schema's `enum`,
    `const`, `minLength` or `maxLength`, the reading that keeps it is taken, if one does.
    """
    plain = text.removeprefix("\n").removesuffix("\n")
    if not isinstance(schema, Mapping) or _fits(plain, schema):
        return plain
    starts = [text[1:], text] if text.startswith(_SPACE) else [text]
    for start in starts:
        for reading in [start[:-1], start] if start.endswith(_SPACE) else [start]:
            if _fits(reading, schema):
                return reading
    return plain


def _fits(text: str, schema: Mapping[str, Any]) -> bool:
    """Whether a text keeps the rules for texts; values of other types are read without spaces."""
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(allowed, list) and any(isinstance(value, str) for value in allowed):
        if text in allowed:
            return True
        # A list may name other values too: they are read from JSON, where spaces do not matter.
        return not all(isinstance(value, str) for value in allowed) and text == text.strip()
    if schema.get("type") != "string":
        return True
    shortest, longest = schema.get("minLength"), schema.get("maxLength")
    if isinstance(shortest, int) and len(text) < shortest:
        return False
    return not (isinstance(longest, int) and len(text) > longest)
