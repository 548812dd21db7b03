"""Checks of request values, for every API but chat. Preprocessing reads chat messages itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlm_serve.errors import FieldError, InvalidRequestError
from vlm_serve.server.http.errors import UnsupportedFieldError


def text_of(item: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field's text.

    Raises:
        InvalidRequestError: the field is not text; the error names it.
    """
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name} must be text", param=f"{where}.{name}")
    return value


def object_of(part: Any, where: str) -> dict[str, Any]:
    """Return a part after checking that it is an object.

    Raises:
        InvalidRequestError: it is not one; the error names its place.
    """
    if not isinstance(part, dict):
        raise InvalidRequestError(f"{where} must be an object", param=where)
    return part


def unsupported(where: str, value: Any) -> UnsupportedFieldError:
    """Return the error for a value that the server does not implement."""
    return UnsupportedFieldError(
        f"{where}: {repr(value)[:40]} is not implemented by this server",
        param=where,
        code="unsupported_field",
    )


def allowed_tools(choice: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the tools that a tool choice allows.

    Raises:
        InvalidRequestError: the tools are not a list of objects.
    """
    tools = choice.get("tools")
    if not isinstance(tools, list):
        raise FieldError(where, "must be a list")
    for tool in tools:
        if not isinstance(tool, dict):
            raise FieldError(where, "must be objects")
    return tools
