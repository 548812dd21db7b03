"""Reading request bodies of bounded size."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.types import Message, Receive

from vlm_serve.server.http.errors import BodyTooLargeError


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
        BodyTooLargeError: the body is too large, as soon as that is known.
    """
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
