"""Reading request bodies of bounded size, and parsing and validating their JSON at a bounded cost.

Parsing and validating hold the interpreter lock in calls that cannot be interrupted, and every
other thread stops meanwhile. So their cost is first counted from the body's bytes and bounded.
Counting works in pieces, so other threads can run in between.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.types import Message, Receive

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.values import short_repr, without_halves
from vlm_serve.server.http.errors import BodyTooLargeError, MediaTypeError
from vlm_serve.server.http.request_memory import BODY_FACTOR, BodyCost, current_share

MAX_JSON_DEPTH = 64
MAX_ERRORS_NAMED = 5
MAX_COST = 2_000_000
"""Cost limit of a body whose reader has no narrower one."""
BASE_COST = 500_000
SMALL_BYTES = 1 << 16
"""A body up to this size is parsed on the event loop; handing it to a thread would take longer."""
# In units of about 100 ns: an object's key is a new string and a slot in a table.
_KEY_COST = 8
_BRACKET_COST = 2
_PIECE_BYTES = 1 << 18
_STRING = re.compile(rb'"[^"]*"')
_BRACES = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
M = TypeVar("M", bound=BaseModel)


def receiver(body: bytes) -> Receive:
    """Return a `receive` for a complete body and a client that never disconnects."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    return receive


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the request's body.

    Raises:
        BodyTooLargeError: the body is too large, unpacked if it is packed, once that is known.
        MediaTypeError: it is packed, but not by gzip.
    """
    packed = is_packed(request, "gzip")
    too_large = BodyTooLargeError(
        f"the request body is larger than {max_bytes} bytes", code="body_too_large"
    )
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:19]) > max_bytes:
        raise too_large
    body = bytearray()
    share = current_share()
    async for chunk in _unpacked(request.stream()) if packed else request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
        if packed and share is not None:
            await share.grow(BODY_FACTOR * len(body))
    if packed:  # Whoever is asked next gets it unpacked.
        about = {b"content-encoding": b"identity", b"content-length": b"%d" % len(body)}
        given = request.scope["headers"]
        request.scope["headers"] = [(name, about.get(name, value)) for name, value in given]
    return bytes(body)


def is_packed(request: Request, *known: str) -> bool:
    """Return True if the body is packed in a known way; raise MediaTypeError for another one."""
    given = request.headers.get("content-encoding", "identity").strip().lower()
    if given not in ("", "identity", *known):
        instead = " or ".join([*known, "no encoding"])
        raise MediaTypeError(
            f"Content-Encoding {short_repr(given)} is not read here: use {instead}"
        )
    return given in known


async def _unpacked(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield what a gzip stream holds, in pieces; raise InvalidRequestError if it is none."""
    unpacking, piece = zlib.decompressobj(wbits=31), b""
    try:
        async for chunk in chunks:
            while chunk or (piece and not unpacking.eof):
                piece = unpacking.decompress(chunk, _PIECE_BYTES)
                chunk = unpacking.unconsumed_tail
                yield piece
                await asyncio.sleep(0)
    except zlib.error:
        pass
    if not unpacking.eof or unpacking.unused_data:
        raise InvalidRequestError("the body is not one whole gzip stream")


def max_cost(max_model_len: int) -> int:
    """Return the cost limit of a body: twice a context of token ids, and a fixed base."""
    return BASE_COST + 2 * max_model_len


def parse_json(body: bytes, limit: int = MAX_COST) -> Any:
    """Parse JSON in UTF-8 of at most MAX_JSON_DEPTH levels.

    Args:
        body: the bytes.
        limit: cost limit: 1 for every value, 4 for a list or object, 8 for a key.

    Raises:
        InvalidRequestError: it is no such JSON, or costs more.
    """
    count_json(body, limit)
    return parse_counted(body)


def parse_counted(body: bytes) -> Any:
    """Parse a body after `count_json` has accepted it.

    Raises:
        InvalidRequestError: it is not valid JSON.
    """
    body = body.removeprefix(_BYTE_ORDER_MARK)
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        whole = without_halves(body.decode("latin-1")).encode("latin-1")
        if whole != body:
            return parse_counted(whole)
        raise InvalidRequestError(
            f"the body is not valid JSON in UTF-8: {error}", code="invalid_json"
        ) from None


def count_json(body: bytes, limit: int = MAX_COST) -> BodyCost:
    """Count the cost of a body in pieces, so that other threads can run in between.

    Args:
        body: the bytes.
        limit: see `parse_json`.

    Raises:
        InvalidRequestError: the body costs more or is nested too deep.
    """
    cost, values, wide = 0, 1, False
    at, inside, brackets = 0, False, bytearray()
    while at < len(body):
        piece = body[at : at + _PIECE_BYTES]
        at += len(piece)
        if at < len(body) and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = piece[:-1]  # keep an escape in one piece
            at -= 1
        wide = wide or not piece.isascii() or b"\\u" in piece
        plain = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        if inside:
            plain = b'"' + plain
        quotes = plain.count(b'"')
        cost += quotes // 2
        if cost <= limit:  # else there may be too many strings to remove
            plain = _STRING.sub(b"", plain)
            inside = quotes % 2 == 1
            if inside:
                plain = plain.partition(b'"')[0]
            signs = plain.translate(_BRACES, _NOT_BRACKETS)
            brackets += signs
            commas, colons = plain.count(b","), plain.count(b":")
            cost += commas + _KEY_COST * colons + _BRACKET_COST * len(signs)
            values += commas + colons + signs.count(b"[")
        if cost > limit:
            raise InvalidRequestError(
                f"the body has more than {limit} JSON values (a list or object counts 4, a key 8)",
                code="too_many_values",
            )
    _check_depth(bytes(brackets))
    return BodyCost(len(body), wide, values)


def _check_depth(brackets: bytes) -> None:
    """Check brackets for nesting depth and balance by removing the innermost pairs."""
    for _ in range(MAX_JSON_DEPTH):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        opened, closed = brackets.count(b"["), brackets.count(b"]")
        problem = (
            f"nested deeper than {MAX_JSON_DEPTH} levels, or its brackets do not match"
            if opened == closed
            else f"not valid JSON: it opens {opened - closed} brackets that it does not close"
            if opened > closed
            else "not valid JSON: it closes brackets that it has not opened"
        )
        raise InvalidRequestError(f"the body is {problem}", code="invalid_json")


def validate(value: Any, model: type[M]) -> M:
    """Validate a parsed body.

    Raises:
        InvalidRequestError: it does not fit the model; the message names the fields.
    """
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
    lines = []
    for item in problems[:MAX_ERRORS_NAMED]:
        line = f"{_location(item['loc'])}: {item['msg']}"
        if line not in lines:
            lines.append(line)
    raise InvalidRequestError("; ".join(lines), param=_field(problems[0]["loc"]))


def _location(path: tuple[int | str, ...]) -> str:
    """Return a path as `messages[0].content`, without names of a union's alternatives."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "list", "dict"):
            text += f".{part[:64]}" if text else part[:64]
    return text or "body"


def _field(path: tuple[int | str, ...]) -> str | None:
    """Return the first name of a path."""
    return str(path[0])[:64] if path else None
