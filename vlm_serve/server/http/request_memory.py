"""One budget for what requests make the server hold, counted before it is read.

A request that finds no room waits without being read, so that its bytes stay with its client. What
is counted is what JSON becomes in memory, not what came over the wire.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_FACTOR = 3
"""Copies of a body while its structure is checked: itself and two that are made from it."""
VALUE_BYTES = 256
"""Most that one JSON value beside its text takes: an object of one member, and a model's share."""
WIDEST_CHARACTER = 4
WIDEST_BODY_FACTOR = 1 + 3 * WIDEST_CHARACTER
"""Itself, its text, its strings and a copy of them, if one of its characters is wide."""
FIRST_BYTES = 1 << 18
"""Counted for the start of a body of unknown length."""
SMALL_PART, LARGE_PART = 1 / 64, 3 / 4


@dataclass(slots=True)
class _Waiter:
    share: Share
    size: int
    granted: asyncio.Future[None]


class RequestMemory:
    """The budget.

    Requests of up to SMALL_PART of it may use all of it, larger ones only LARGE_PART: whoever fills
    that with large bodies holds up nobody who asks a question. One large request at a time, the
    first that waited, is given what it needs even beyond, so that those who have a part of what
    they need never wait for each other for ever. The next one is while all of them are within the
    budget again: at most one is ever beyond it.

    Args:
        most: bytes.
        on_freed: told of bytes that were given back.

    Attributes:
        held: bytes that open requests hold or have been promised.
    """

    def __init__(self, most: int, on_freed: Callable[[int], None] = lambda _: None) -> None:
        self.most = most
        self._on_freed = on_freed
        self.held = 0
        self._small = int(most * SMALL_PART)
        self._large_limit = int(most * LARGE_PART)
        self._waiting: deque[_Waiter] = deque()
        self._favoured: Share | None = None

    def fits(self, share: Share, size: int) -> bool:
        """Whether a share may become that large now."""
        if share is self._favoured:
            return True
        limit = self.most if size <= self._small else self._large_limit
        return self.held - share.size + size <= limit

    def resize(self, share: Share, size: int) -> None:
        """Changes what a share holds, room or not."""
        freed = share.size - size
        self.held -= freed
        share.size = size
        if freed > 0:
            self._on_freed(freed)
            self._grant()

    async def wait(self, share: Share, size: int) -> None:
        """Returns once a share has become that large."""
        waiter = _Waiter(share, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._grant()
        try:
            await waiter.granted
        finally:
            if not waiter.granted.done() or waiter.granted.cancelled():
                self._waiting = deque(each for each in self._waiting if each is not waiter)

    def forget(self, share: Share) -> None:
        if share is self._favoured:
            self._favoured = None
        self.resize(share, 0)

    def _grant(self) -> None:
        """Lets everybody in for whom there is room, in order; without room, one beyond it."""
        if self.held <= self.most:
            self._favoured = None
        left: deque[_Waiter] = deque()
        for waiter in self._waiting:
            if waiter.granted.done():
                continue
            if self._favoured is None and not self.fits(waiter.share, waiter.size):
                self._favoured = waiter.share
            if not self.fits(waiter.share, waiter.size):
                left.append(waiter)
                continue
            self.held += waiter.size - waiter.share.size
            waiter.share.size = waiter.size
            waiter.granted.set_result(None)
        self._waiting = left


class Share:
    """What one request holds of the budget. It is given back when the last of its users, the
    request itself and work on other threads, has ended.

    Attributes:
        size: bytes.
    """

    def __init__(self, memory: RequestMemory) -> None:
        self.size = 0
        self._memory = memory
        self._users = 1

    def fits(self, size: int) -> bool:
        """Whether it may hold that much without waiting."""
        return size <= self.size or self._memory.fits(self, size)

    async def cover(self, size: int) -> None:
        """Returns once it holds at least that much."""
        if size > self.size:
            if self._memory.fits(self, size):
                self._memory.resize(self, size)
            else:
                await self._memory.wait(self, size)

    def shrink(self, size: int) -> None:
        """Gives back what is beyond that size."""
        if size < self.size:
            self._memory.resize(self, size)

    def used_by_another(self) -> None:
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        if not self._users:
            self._memory.forget(self)


_current: ContextVar[Share | None] = ContextVar("share", default=None)


def current_share() -> Share | None:
    """The share of the request that is being answered; None outside of one with a body."""
    return _current.get()


class Intake:
    """Counts the body of every request before it is read. A plain ASGI layer.

    Args:
        max_bytes: of one body; its route refuses more.
    """

    def __init__(self, app: ASGIApp, memory: RequestMemory, max_bytes: int) -> None:
        self._app = app
        self._memory = memory
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        declared = _declared(scope)
        if declared == 0:
            _current.set(None)  # a connection's next request has the context of the one before
            await self._app(scope, receive, send)
            return
        share = Share(self._memory)
        _current.set(share)
        read, complete = 0, False

        async def counted() -> Message:
            nonlocal read, complete
            if not complete:
                wanted = min(self._max_bytes, max(FIRST_BYTES, 2 * read))
                if declared is not None:
                    wanted = min(wanted, declared)
                await share.cover(BODY_FACTOR * wanted)
            message = await receive()
            read += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            share.leave()


def _declared(scope: Scope) -> int | None:
    """Bytes of the request's body, None if it does not say."""
    if scope["type"] != "http":
        return 0
    headers: dict[bytes, bytes] = dict(scope["headers"])
    if b"transfer-encoding" in headers:
        return None
    length = headers.get(b"content-length", b"0")
    return int(length[:19]) if length.isdigit() else None


@dataclass(frozen=True, slots=True)
class BodyCost:
    """What a JSON body may become in memory, as far as its bytes show.

    Attributes:
        size: of itself.
        wide: one of its characters may be, of which a text takes four bytes for each of its own.
        values: as many as it has, or a few more.
    """

    size: int
    wide: bool
    values: int

    def to_parse(self) -> int:
        """Most bytes while it is parsed: itself, its text, its strings, its values."""
        factor = WIDEST_BODY_FACTOR if self.wide else BODY_FACTOR
        return self.size * factor + self.values * VALUE_BYTES

    def when_parsed(self, value: Any) -> int:
        """Most bytes that are left of it: its strings and values."""
        strings = _string_bytes(value) if self.wide else self.size
        return strings + self.values * VALUE_BYTES


def _string_bytes(value: Any) -> int:
    """Bytes of all characters in a parsed value."""
    total, rest = 0, [value]
    while rest:
        each = rest.pop()
        if isinstance(each, str):
            total += len(each) * (1 if each.isascii() else WIDEST_CHARACTER)
        elif isinstance(each, dict):
            rest += each
            rest += each.values()
        elif isinstance(each, list):
            rest += each
    return total
