"""From the bytes of a body to a validated model, at a cost that is known before it is spent.

Parsing and validating hold the interpreter's lock in calls that nothing can interrupt, so that they
would stop every other thread, however many there are. Their cost is bounded by what the body's
bytes show: it is counted first, in pieces between which others can run.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from vlm_serve.errors import InvalidRequestError
from vlm_serve.server.http.request_memory import BodyCost

MAX_JSON_DEPTH = 64
MAX_ERRORS_NAMED = 5
MAX_COST = 2_000_000
"""Of a body whose reader has no narrower bound."""

BASE_COST = 500_000
SMALL_BYTES = 1 << 16
"""A body up to this size is parsed where it is: another thread would take longer to ask."""

# In units of about 100 ns: an object's key is a new string and a place in a table.
_KEY_COST = 8
_BRACKET_COST = 2
_PIECE_BYTES = 1 << 18

_STRING = re.compile(rb'"[^"]*"')
_BRACES = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

M = TypeVar("M", bound=BaseModel)


def max_cost(max_model_len: int) -> int:
    """The most that a body may cost: room for a context of token ids twice, and for much else."""
    return BASE_COST + 2 * max_model_len


def parse_json(body: bytes, limit: int = MAX_COST) -> Any:
    """Parses JSON in UTF-8 of at most MAX_JSON_DEPTH levels.

    Args:
        limit: the most that it may cost: 1 for every value, 4 for a list or object, 8 for a key.

    Raises InvalidRequestError.
    """
    count_json(body, limit)
    return parse_counted(body)


def parse_counted(body: bytes) -> Any:
    """Parses a body that `count_json` has let pass. Raises InvalidRequestError."""
    try:
        return from_json(body.removeprefix(_BYTE_ORDER_MARK), allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(
            f"the body is not valid JSON in UTF-8: {error}", code="invalid_json"
        ) from None


def count_json(body: bytes, limit: int = MAX_COST) -> BodyCost:
    """What a body holds, in pieces between which other threads can run. `limit`: see `parse_json`.

    Raises InvalidRequestError for one that costs more or is nested too deep.
    """
    cost, values, wide = 0, 1, False
    at, inside, brackets = 0, False, bytearray()
    while at < len(body):
        piece = body[at : at + _PIECE_BYTES]
        at += len(piece)
        if at < len(body) and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = piece[:-1]  # the escape that it begins belongs to the next piece
            at -= 1
        wide = wide or not piece.isascii() or b"\\u" in piece
        plain = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        if inside:
            plain = b'"' + plain
        quotes = plain.count(b'"')
        cost += quotes // 2
        if cost <= limit:  # else there may be too many strings to look for
            plain = _STRING.sub(b"", plain)
            inside = quotes % 2 == 1
            if inside:
                plain = plain.partition(b'"')[0]
            found = plain.translate(_BRACES, _NOT_BRACKETS)
            brackets += found
            commas, colons = plain.count(b","), plain.count(b":")
            cost += commas + _KEY_COST * colons + _BRACKET_COST * len(found)
            values += commas + colons + found.count(b"[")
        if cost > limit:
            raise InvalidRequestError(
                f"the body has more than {limit} JSON values (a list or object counts 4, a key 8)",
                code="too_many_values",
            )
    _check_depth(bytes(brackets))
    return BodyCost(len(body), wide, values)


def _check_depth(brackets: bytes) -> None:
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
