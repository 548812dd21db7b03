"""Reading a JSON body that nobody can knock the server over with: size, depth and number of values
are bounded before anything is parsed."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from vlm_serve.errors import InvalidRequestError
from vlm_serve.server.errors import BodyTooLargeError, MediaTypeError

MAX_JSON_DEPTH = 64
MAX_JSON_VALUES = 2_000_000
MAX_ERRORS_NAMED = 5

_STRING = re.compile(rb'"[^"]*"')
_BRACES = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

M = TypeVar("M", bound=BaseModel)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The request's body. Raises BodyTooLargeError as soon as it is known to be too large."""
    too_large = BodyTooLargeError(
        f"the request body is larger than {max_bytes} bytes", code="body_too_large"
    )
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:19]) > max_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


async def read_json(request: Request, model: type[M], max_bytes: int) -> M:
    """The request's body as a validated model.

    Raises:
        MediaTypeError: the body is not declared as JSON. (A browser asks for permission before it
            sends that type to another site's server; other types it would just send.)
        BodyTooLargeError: over the size limit.
        InvalidRequestError: not JSON, too deep, too many values, or not what the model describes;
            the message names the field.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise MediaTypeError("the body must be sent with Content-Type: application/json")
    try:
        body = await read_body(request, max_bytes)
    except ClientDisconnect:
        raise InvalidRequestError("the client went away before its body was complete") from None
    return validate(parse_json(body), model)


def parse_json(body: bytes) -> Any:
    """Parses bounded JSON: at most MAX_JSON_DEPTH levels and MAX_JSON_VALUES values, finite
    numbers, valid Unicode. Raises InvalidRequestError."""
    _check_structure(body)
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequestError("the body has half a surrogate pair in a string") from None
    except json.JSONDecodeError as error:
        raise InvalidRequestError(
            f"the body is not valid JSON: {error.msg} at character {error.pos}", code="invalid_json"
        ) from None
    except (ValueError, RecursionError):  # bytes that are no UTF-8, numbers of absurd length
        raise InvalidRequestError("the body is not valid JSON", code="invalid_json") from None
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


def _check_structure(body: bytes) -> None:
    """Counts on the raw bytes: every pass below runs at the speed of memory, whatever the body."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    plain = _STRING.sub(b"", plain)
    if plain.count(b",") + plain.count(b"[") + plain.count(b"{") > MAX_JSON_VALUES:
        raise InvalidRequestError(f"the body has more than {MAX_JSON_VALUES} JSON values")
    brackets = plain.translate(_BRACES, _NOT_BRACKETS)
    for _ in range(MAX_JSON_DEPTH):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise InvalidRequestError(
            f"the body is nested deeper than {MAX_JSON_DEPTH} levels, or its brackets do not match",
            code="invalid_json",
        )


def validate(value: Any, model: type[M]) -> M:
    """Checks a parsed body against its model. Raises InvalidRequestError that names the fields."""
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
    lines = []
    for item in found[:MAX_ERRORS_NAMED]:
        line = f"{_location(item['loc'])}: {item['msg']}"
        if line not in lines:
            lines.append(line)
    raise InvalidRequestError("; ".join(lines), param=_field(found[0]["loc"]))


def _location(path: tuple[int | str, ...]) -> str:
    """`messages[0].content`; parts that only name an alternative of a union are left out."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "list", "dict"):
            text += f".{part[:64]}" if text else part[:64]
    return text or "body"


def _field(path: tuple[int | str, ...]) -> str | None:
    return str(path[0])[:64] if path else None
