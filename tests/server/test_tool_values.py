"""White space around a parameter: a value keeps its schema wherever some reading of it does."""

from __future__ import annotations

from typing import Any

import pytest

from vlm_serve.server.tool_values import trim

COLOUR = {"type": "string", "enum": ["red", "yellow", " x"]}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        (" yellow ", COLOUR, "yellow"),
        ("\tred\n", COLOUR, "red"),
        ("\nred\n", COLOUR, "red"),
        (" x ", COLOUR, " x"),
        ("\n red \n", {"type": "string"}, " red "),
        (" red ", {"const": "red"}, "red"),
        (" abc ", {"type": "string", "maxLength": 3}, "abc"),
        ("\nab\n", {"type": "string", "minLength": 4}, "\nab\n"),
        ("", COLOUR, ""),
        (" 1 ", None, " 1 "),
    ],
)
def test_a_value_is_read_so_that_it_fits(text: str, schema: Any, value: str) -> None:
    assert trim(text, schema) == value
