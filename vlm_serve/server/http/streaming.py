"""Server-sent events, and detecting disconnected clients.

A stream's status waits for its first event, so that earlier errors have one of their own. Clients
and proxies give up on a silent server, so it waits only so long.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlm_serve.server.failover.attempt import PING
from vlm_serve.server.http.errors import is_anthropic

_T = TypeVar("_T")

DONE = b"data: [DONE]\n\n"

Event = dict[str, Any] | bytes
"""The body of a stream's event, or the event itself."""

Events = AsyncGenerator[bytes, None]


class ClientGoneError(Exception):
    """The client disconnected before it had its answer."""


to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode
"""Returns a value as the JSON of an event."""


def event(body: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return one server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {to_json(body)}\n\n".encode()


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnected(request: Request, work: Awaitable[_T]) -> _T:
    """Return the result of the work; cancel it when the client disconnects.

    Raises:
        ClientGoneError: the client has disconnected.
    """
    return await _until_gone(work, request.receive)


async def _until_gone(work: Awaitable[_T], receive: Receive) -> _T:
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        await cancelled(watching)
        await cancelled(working)


async def cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its cleanup; its result is dropped."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not report it


BODY = "vlm_serve.body"
"""Key of the ASGI scope: a `connections.ChunkedBody`, where there is one."""


class Direct:
    """The way of a stream's events to its connection past its task, which each would cost a turn.

    Args:
        scope: of the request.
        named: each event's name is its body's `type`, and the last event ends the stream. Without
            names the stream ends with `[DONE]`.

    Attributes:
        open: the task waits for the next event; all before it have been sent.
        num_sent: how often something was sent, this way or another.
    """

    def __init__(self, scope: Mapping[str, Any], *, named: bool = False) -> None:
        self._body = scope.get(BODY)
        self.named, self.open, self.num_sent = named, False, 0

    def ready(self) -> bool:
        """Return True if events may be sent this way now."""
        return self.open and self._body is not None and self._body.ready()

    def send(self, events: Sequence[Event]) -> None:
        """Send events, which may be none."""
        if events and self._body is not None:
            self._body.write(self.bytes_of(events))
            self.num_sent += 1

    def bytes_of(self, events: Sequence[Event]) -> bytes:
        """Return events as they are sent."""
        return b"".join(
            each if isinstance(each, bytes) else event(each, each["type"] if self.named else None)
            for each in events
        )


Extra = Callable[[], Mapping[str, Any]]
"""Returns further fields for the ASGI message of the latest chunk."""


async def stream_response(
    request: Request,
    events: Events,
    headers: Mapping[str, str],
    begun: asyncio.Event,
    silence: float,
    direct: Direct,
    extra: Extra = dict,
) -> Response:
    """Wait for the first chunk, for the longest silence at most (0: any), and return the stream.

    Earlier errors get a status of their own; `begun` is set where they no longer can.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await until_disconnected(request, asyncio.wait({first}, timeout=silence or None))
    except BaseException:
        await cancelled(first)
        raise
    if first.done():
        first.result()  # raises what came before the status
    else:
        begun.set()
    return EventStream(first, events, headers, extra, silence, direct)


STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers of every stream; the second one tells nginx to pass events on at once."""


async def sent_until_disconnected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Send a response until it ends or the client disconnects; raise what ends the sending."""
    with suppress(ClientGoneError):
        await _until_gone(work, receive)


class EventStream(Response):
    """Sends events until they end or the client disconnects, then closes their generator.

    Starlette's own streaming response notices a disconnect only when it next sends something. A
    queued request sends nothing.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Future[bytes],
        rest: Events,
        headers: Mapping[str, str],
        extra: Extra = dict,
        silence: float = 0.0,
        direct: Direct | None = None,
    ) -> None:
        super().__init__(headers={**STREAM_HEADERS, **headers})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._extra = extra
        self._silence = silence
        self._direct = direct or Direct({})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await sent_until_disconnected(self._send(scope, send), receive)
        finally:
            await self._rest.aclose()

    async def _send(self, scope: Scope, send: Send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        pinging = asyncio.ensure_future(self._ping(scope, send)) if self._silence else None
        try:
            await self._pass_on(await self._first, send)
            async for chunk in self._rest:
                await self._pass_on(chunk, send)
        finally:
            self._direct.open = False
            if pinging is not None:
                await cancelled(pinging)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass_on(self, chunk: bytes, send: Send) -> None:
        self._direct.num_sent += 1
        self._direct.open = False
        part = {"type": "http.response.body", "more_body": True}
        await send({**part, **self._extra(), "body": chunk})
        self._direct.open = True

    async def _ping(self, scope: Scope, send: Send) -> None:
        """Break every silence; events are sent whole, so this stands between them."""
        ping = event({"type": "ping"}, "ping") if is_anthropic(scope) else b": waiting\n\n"
        part = {"type": "http.response.body", "more_body": True, PING: True, "body": ping}
        before = -1 if self._first.done() else 0
        while True:
            if self._direct.num_sent == before:
                await send(part)
            before = self._direct.num_sent
            await asyncio.sleep(self._silence)
