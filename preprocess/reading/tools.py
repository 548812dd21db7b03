"""Reads definitions and calls of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.values import begins_json, list_of, plain_data

MAX_ARGUMENTS_CHARACTERS = 1 << 20
"""Limit on the JSON text of one tool call's arguments."""

# Templates print definitions as written: one order of fields gives equal tools equal prompts.
_ORDER = ("type", "name", "description", "parameters")


def read_tools(tools: Any) -> list[dict[str, Any]]:
    """Read tool definitions in the form of any API, as templates see them.

    A definition is a function, or an object with one in `function`. Fields without a value are
    dropped.

    Raises InvalidRequestError, naming the tool at fault.
    """
    if tools is None:
        return []
    return [read_tool(tool, f"tools[{at}]") for at, tool in enumerate(list_of(tools, "tools"))]


def read_tool(tool: Any, where: str) -> dict[str, Any]:
    """Read one definition as `read_tools` does."""
    plain = _without_nulls(plain_data(tool, where))
    nested = isinstance(plain, dict) and "function" in plain
    function = plain["function"] if nested else plain
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} must describe a function by name", param=where)
    function = _without_nulls(function)
    for schema in ("parameters", "input_schema"):
        if schema in function:
            function[schema] = _without_nulls(function[schema])
    function = {name: function[name] for name in _ORDER if name in function} | function
    return {"type": "function", **plain, "function": function} if nested else function


def _without_nulls(value: Any) -> Any:
    """Drop an object's fields without a value, such as `properties: null` of a schema."""
    if not isinstance(value, dict):
        return value
    return {name: each for name, each in value.items() if each is not None}


def is_cut(call: Any) -> bool:
    """Return True if a call's arguments are JSON text of an object that ends too early."""
    function = call.get("function") if isinstance(call, Mapping) else None
    text = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(text, str) or len(text) > MAX_ARGUMENTS_CHARACTERS:
        return False
    if not text.lstrip().startswith("{"):
        return False
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return not error.msg.startswith("Extra data") and begins_json(text)
    except (ValueError, RecursionError):
        return False
    return False


def read_tool_call(call: Any, where: str) -> dict[str, Any]:
    """Convert a tool call for templates: parse OpenAI's JSON text of arguments into an object.

    Args:
        call: a function's name and arguments, or an object with them in `function`.
        where: its place in the request, for errors.

    Raises InvalidRequestError.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} must name a function", param=where)
    place = f"{where}.function.arguments" if "function" in call else f"{where}.arguments"
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        if len(arguments) > MAX_ARGUMENTS_CHARACTERS:  # parsing it would block all requests
            raise InvalidRequestError(
                f"{place} must have at most {MAX_ARGUMENTS_CHARACTERS} characters", param=place
            )
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise InvalidRequestError(f"{place} must be a JSON object", param=place)
    function = function | {"arguments": plain_data(arguments, place)}
    return call | {"function": function} if "function" in call else function
