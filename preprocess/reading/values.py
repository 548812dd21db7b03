"""Checks of values in a request's JSON; each error names the value's place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from vlm_serve.errors import InvalidRequestError, UnsupportedFieldError

MAX_DEPTH = 64


def plain_data(value: Any, param: str, depth: int = MAX_DEPTH) -> Any:
    """Return a fresh copy made of dict, list, str, int, float, bool and None alone.

    Raises InvalidRequestError for anything else, and for data nested deeper than `MAX_DEPTH`.
    """
    if depth == 0:
        raise InvalidRequestError(f"{param} is nested deeper than {MAX_DEPTH} levels", param=param)
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        if any(not isinstance(key, str) for key in value):
            raise InvalidRequestError(f"{param} has a key that is not a string", param=param)
        return {str(key): plain_data(item, param, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item, param, depth - 1) for item in value]
    raise InvalidRequestError(f"{param} must be JSON data, not {type(value).__name__}", param=param)


def text_of(item: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field's text. Raises InvalidRequestError if the field is not text."""
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name} must be text", param=f"{where}.{name}")
    return value


def object_of(value: Any, where: str) -> Mapping[str, Any]:
    """Return a value after checking that it is an object. Raises InvalidRequestError."""
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{where} must be an object", param=where)
    return value


def list_of(value: Any, where: str, expected: str = "a list") -> Sequence[Any]:
    """Return a value after checking that it is a list. Raises InvalidRequestError."""
    if not isinstance(value, list | tuple):
        raise InvalidRequestError(f"{where} must be {expected}", param=where)
    return value


_SURROGATE = re.compile(
    r"(?<!\\)((?:\\\\)*)(?:(\\u[dD][89abAB]..\\u[dD][c-fC-F]..)|\\u[dD][89a-fA-F]..)"
)
_MAX_SURROGATES = 1 << 18


def without_halves(text: str) -> str:
    """Return JSON text with U+FFFD for escapes of half a character.

    Clients cut texts in the middle of an emoji and send them in every later turn.
    """
    return _SURROGATE.sub(
        lambda found: found[0] if found[2] else f"{found[1]}\\ufffd", text, _MAX_SURROGATES
    )


def begins_json(text: str) -> bool:
    """Return True if the text is a prefix of JSON."""
    try:
        from_json(text, allow_partial=True)
    except ValueError:
        return False
    return True


def unsupported(where: str, value: Any) -> UnsupportedFieldError:
    """Return the error for a value that the server does not implement."""
    return UnsupportedFieldError(
        f"{where}: {short_repr(value)} is not implemented by this server",
        param=where,
        code="unsupported_field",
    )


def short_repr(value: Any) -> str:
    """Format a client's value for an error message, shortened."""
    text = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."
