"""Lines of OpenAI batch files: requests that are read, and rows that are written."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vlm_serve.batch.asgi import HttpReply, reply_json
from vlm_serve.batch.journal import Row
from vlm_serve.batch.order import ReuseKey, reuse_key_of
from vlm_serve.errors import InvalidRequestError
from vlm_serve.server.http.body import count_json, parse_json

_PATH = re.compile(r"/[A-Za-z0-9_./-]{1,127}", re.ASCII)
_PIECE_BYTES = 1 << 20
MAX_CUSTOM_ID = 512


@dataclass(frozen=True, slots=True)
class RawLine:
    """The bytes of a line.

    Attributes:
        number: from 1.
        offset: position of its first byte in the file.
        content: its bytes without the line break; only their beginning if it is too long.
        too_long: it is longer than the limit.
    """

    number: int
    offset: int
    content: bytes
    too_long: bool


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input.

    Attributes:
        id: of its output line; a digest of the line's number and bytes, so a later run recognises
            answered lines, and changed lines are new.
        offset, size: position of its bytes in the file.
        path: the route; empty for an invalid line.
        problem: the error of an invalid line, else None.
    """

    id: str
    number: int
    offset: int
    size: int
    custom_id: str | None
    path: str
    reuse_key: ReuseKey
    problem: InvalidRequestError | None


def raw_lines(file: BinaryIO, max_bytes: int) -> Iterator[RawLine]:
    """Yield the lines of a file except blank ones.

    Args:
        max_bytes: limit of a line; no more of it is held at once.
    """
    offset = number = 0
    while start := file.readline(max_bytes + 2):
        number += 1
        length, piece = len(start), start
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(_PIECE_BYTES)
            length += len(piece)
        content = start.rstrip(b"\r\n")
        cut = length > len(start) and len(content) > max_bytes
        if content.strip() or cut:
            yield RawLine(number, offset, content, len(content) > max_bytes)
        offset += length


def line_of(raw: RawLine, max_bytes: int, endpoint: str | None = None) -> Line:
    """Read a line; its errors become its `problem`.

    Args:
        endpoint: the only route that the line may name; None: any.
    """
    digest = hashlib.blake2b(str(raw.number).encode() + b":" + raw.content, digest_size=12)
    name = f"batch_req_{digest.hexdigest()}"
    custom_id: str | None = None
    path, reuse_key, problem = "", ReuseKey(), None
    try:
        if raw.too_long:
            raise InvalidRequestError(
                f"the line is larger than {max_bytes} bytes", code="body_too_large"
            )
        value = parse_json(raw.content)
        if not isinstance(value, dict):
            raise InvalidRequestError("the line must be a JSON object", code="invalid_json")
        given = value.get("custom_id")
        if not isinstance(given, str) or not 0 < len(given) <= MAX_CUSTOM_ID:
            raise InvalidRequestError(
                f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters", param="custom_id"
            )
        custom_id = given
        path = _checked_path(value, endpoint)
        reuse_key = reuse_key_of(path, value["body"])
    except InvalidRequestError as error:
        problem = error
    return Line(name, raw.number, raw.offset, len(raw.content), custom_id, path, reuse_key, problem)


def _checked_path(value: dict[str, Any], endpoint: str | None) -> str:
    """Return the line's route. Raises InvalidRequestError for a bad field."""
    if value.get("method") != "POST":
        raise InvalidRequestError('method must be "POST"', param="method")
    url, body = value.get("url"), value.get("body")
    if not isinstance(url, str) or not _PATH.fullmatch(url):
        raise InvalidRequestError("url must be a route such as /v1/chat/completions", param="url")
    if endpoint is not None and url != endpoint:
        raise InvalidRequestError(
            f"url must be the batch's endpoint {endpoint}",
            param="url",
            code="mismatched_endpoint",
        )
    if not isinstance(body, dict):
        raise InvalidRequestError("body must be a JSON object", param="body")
    if body.get("stream"):
        raise InvalidRequestError(
            "streaming is not supported in a batch; remove stream", param="stream"
        )
    return url


def parsing_bytes(content: bytes) -> int:
    """Return the most memory that parsing a line takes; 0 if it is refused before."""
    try:
        return count_json(content).to_parse()
    except InvalidRequestError:
        return 0


def read_request(path: Path, offset: int, size: int) -> bytes:
    """Read the `body` of a valid line again."""
    with path.open("rb") as file:
        file.seek(offset)
        value = json.loads(file.read(size).decode("utf-8-sig"))
    return json.dumps(value["body"], ensure_ascii=False).encode()


def answer_row(name: str, custom_id: str | None, request_id: str, reply: HttpReply) -> Row:
    """Build the row of a reply.

    Args:
        name: the row's id.
    """
    response = {"status_code": reply.status, "request_id": request_id, "body": reply_json(reply)}
    return {"id": name, "custom_id": custom_id, "response": response, "error": None}


def error_row(
    name: str, custom_id: str | None, code: str, message: str, param: str | None = None
) -> Row:
    """Build the row of a request without a reply."""
    error = {"code": code, "message": message, "param": param}
    return {"id": name, "custom_id": custom_id, "response": None, "error": error}
