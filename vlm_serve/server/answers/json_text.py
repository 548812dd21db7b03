"""Decoding the content of a JSON string while it comes."""

from __future__ import annotations

import json
import re

DECODABLE = re.compile(r'(?:[^"\\]+|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
"""The content of a string up to its end or to an escape that is not complete."""
_HIGH_SURROGATE = re.compile("[\ud800-\udbff]$")


def decodable(text: str) -> tuple[str, int]:
    """Return what the start of a string's content stands for, and its length.

    An escape that is not complete, and what follows a quotation mark, is left.
    """
    found = DECODABLE.match(text)
    assert found is not None
    made, size = json.loads(f'"{found.group()}"', strict=False), found.end()
    if _HIGH_SURROGATE.search(made) and text[:size][-6:].startswith("\\u"):
        made, size = made[:-1], size - 6  # its other half may follow
    return made, size
