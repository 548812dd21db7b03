"""Server-sent events, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_T = TypeVar("_T")

DONE = b"data: [DONE]\n\n"

Chunks = AsyncGenerator[dict[str, Any], None]
"""The bodies of a stream's events."""

Events = AsyncGenerator[bytes, None]


class ClientGoneError(Exception):
    """The client closed its connection before it had its answer."""


def event(body: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {text}\n\n".encode()


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnected(request: Request, work: Awaitable[_T]) -> _T:
    """The result of the work, which is cancelled as soon as the client goes away.

    Raises ClientGoneError in that case, else what the work raises.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        await cancelled(watching)
        await cancelled(working)


async def cancelled(task: asyncio.Future[Any]) -> None:
    """Cancels a task and waits until its cleaning up is done; its result is of no interest."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # looked at, so that asyncio does not report it as lost


async def as_events(chunks: Chunks, *, named: bool = False) -> Events:
    """The chunks as events.

    Args:
        named: each event is called by its body's `type`, and the last one ends the stream; without
            names the end is `[DONE]`.
    """
    async with aclosing(chunks):
        async for chunk in chunks:
            yield event(chunk, chunk["type"] if named else None)
    if not named:
        yield DONE


Extra = Callable[[], Mapping[str, Any]]
"""What else goes into the ASGI message of the chunk that has come last."""


def nothing() -> Mapping[str, Any]:
    return {}


async def stream_response(
    request: Request,
    chunks: Chunks,
    headers: Mapping[str, str],
    *,
    named: bool = False,
    extra: Extra = nothing,
) -> Response:
    """Waits for the first chunk, so that errors up to there have a status of their own."""
    events = as_events(chunks, named=named)
    first = await until_disconnected(request, anext(events))
    return EventStream(first, events, headers, extra)


class EventStream(Response):
    """Sends events until they end or the client goes away; closes their generator either way.

    Starlette's own streaming response learns of a lost client only when it next sends something,
    which a request that waits in a queue does not do.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, rest: Events, headers: Mapping[str, str], extra: Extra = nothing
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", **headers})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._extra = extra

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        watching = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await cancelled(watching)
            await cancelled(sending)
            await self._rest.aclose()

    async def _send(self, send: Send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        part = {"type": "http.response.body", "more_body": True}
        await send({**part, **self._extra(), "body": self._first})
        async for chunk in self._rest:
            await send({**part, **self._extra(), "body": chunk})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
