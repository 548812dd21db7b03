"""From the text of a tool call's parameter to its value: types, and the white space around it."""

from __future__ import annotations

from typing import Any

import pytest

from vlm_serve.server.answers.tool_values import read

COLOUR = {"type": "string", "enum": ["red", "yellow", " x"]}
CODE = {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"}
ROOT: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "colour": COLOUR,
        "a/b": {"$ref": "#/$defs/colour"},
        "circle": {"anyOf": [{"$ref": "#/$defs/circle"}, {"type": "integer"}]},
    },
}


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
        (" 1 ", None, 1),
        (" AB1", CODE, "AB1"),
        ("AB1\t", CODE, "AB1"),
        ("\nAB1\n", CODE, "AB1"),
        (" 2026-11-21", {"type": "string", "format": "date"}, "2026-11-21"),
        (" a", {"type": "string", "pattern": "^ a"}, " a"),
        (" a", {"type": "string", "pattern": "^(?: ?a)"}, "a"),
        ("a \n", {"type": "string", "pattern": "(a[ \\t]{1,2})$"}, "a "),
        (" red", {"$ref": "#/$defs/colour"}, "red"),
        (" red", {"$ref": "#/$defs/a~1b", "description": "x"}, "red"),
        (" red", {"allOf": [{"$ref": "#/$defs/colour"}]}, "red"),
        (" 5", {"$ref": "#/$defs/circle"}, 5),
        ("5", {"$ref": "#/$defs/none"}, 5),
        (" AB1", {"anyOf": [{"type": "integer"}, CODE]}, "AB1"),
        (" 12", {"anyOf": [CODE, {"type": "integer"}]}, 12),
        (" null ", {"oneOf": [COLOUR, {"type": "null"}]}, None),
        ("12345", {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]}, "12345"),
        ("12345", {"enum": ["12345", "x"]}, "12345"),
        (" 5 ", {"enum": ["red", 5]}, 5),
        ("true", {"enum": [1, "true"]}, "true"),
        ("[1]", {"type": ["integer", "string"]}, "[1]"),
        ("2.0", {"type": "integer"}, 2.0),
        ("[1]", {"type": "integer"}, [1]),
    ],
)
def test_a_value_is_read_so_that_it_fits(text: str, schema: Any, value: Any) -> None:
    assert read(text, schema, ROOT) == value
    assert type(read(text, schema, ROOT)) is type(value)


def test_references_that_branch_again_and_again_take_no_time() -> None:
    names = [f"#/$defs/{number}" for number in range(1000)]
    branches = [{"anyOf": [{"$ref": name}, {"$ref": name}]} for name in names]
    root = {"$defs": {str(number - 1): each for number, each in enumerate(branches) if number}}
    assert read(" 5", {"$ref": names[0]}, root) == 5


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("3", {"type": "string"}, "3"),
        ("3", {}, 3),
        ("3", None, 3),
        ("three", {"type": "integer"}, "three"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("None", {"type": ["integer", "null"]}, None),
        ("None", {}, "None"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ('{"a": ', {"type": "object"}, '{"a": '),
        ("'a'", {"type": "array"}, "'a'"),
        ("[1, 'a', None]", {"type": "array"}, [1, "a", None]),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "integer"}, "1e999"),
        ("[1e999]", {}, "[1e999]"),
        ("[" * 100_000, {}, "[" * 100_000),
    ],
    ids=lambda value: str(value)[:30],
)
def test_parameters_take_the_type_their_schema_names(text: str, schema: Any, value: Any) -> None:
    assert read(text, schema) == value
    assert type(read(text, schema)) is type(value)
