"""Answers the requests of a batch: bounded in number, in the order of a `ReuseQueue`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.types import ASGIApp

from vlm_serve.batch.asgi import HttpReply, error_code, post
from vlm_serve.batch.order import ReuseQueue
from vlm_serve.errors import EngineClosedError
from vlm_serve.server.http.streaming import cancelled

RETRY_SECONDS = 0.2
_WAITS = (0.5, 1.0, 2.0, 4.0)
"""Seconds before a request is sent once more that the server could not answer by its own fault."""
_STOPPED = ("engine_stopped", "shutting_down")
_LATER = ("queue_full", "asleep")

T = TypeVar("T")


async def answer_all(
    queue: ReuseQueue,
    width: int,
    answer: Callable[[int], Awaitable[T]],
    on_reply: Callable[[int, T], None],
) -> None:
    """Answer all requests of a queue, at most `width` at a time.

    If one raises or the caller is cancelled, the others are cancelled and waited for.

    Args:
        answer: answers the request of an index.
        on_reply: receives the index and the result of each.
    """
    running: dict[asyncio.Future[T], int] = {}
    try:
        while True:
            while len(running) < width and (index := queue.take()) is not None:
                running[asyncio.ensure_future(answer(index))] = index
            if not running:
                return
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = running[task]
                on_reply(index, task.result())
                del running[task]
                queue.ended(index)
    finally:
        for task in running:
            task.cancel()
        for task in running:
            await cancelled(task)


async def post_patiently(
    app: ASGIApp,
    path: str,
    body: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
    state: Mapping[str, Any] | None = None,
) -> HttpReply:
    """Send a request to a route, again and again while the server's queue is full or the server
    sleeps, and a few times if it has another fault of its own that may pass (503), or has ended the
    request by an operator's order.

    Args:
        state: see `post`.

    Raises EngineClosedError if the engine has stopped or the server is shutting down.
    """
    waits = iter(_WAITS)
    while True:
        reply = await post(app, path, body, headers, state)
        code = error_code(reply)
        if code in _STOPPED:
            raise EngineClosedError("the engine has stopped; run again to continue", code=code)
        wait = RETRY_SECONDS if code in _LATER else None
        if wait is None and reply.status == 503:
            wait = next(waits, None)
        if wait is None:
            return reply
        await asyncio.sleep(wait)
