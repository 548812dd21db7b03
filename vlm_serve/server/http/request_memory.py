"""One memory budget for all open requests, charged before anything is read.

A request without space in the budget waits unread, so its bytes stay at its client. The budget
counts the size of JSON in memory, not on the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlm_serve.errors import OverloadedError
from vlm_serve.preprocess.media.fetch import Hold
from vlm_serve.system.stopping import Stop

BODY_FACTOR = 3
"""Copies of a body while its structure is checked: the body and two made from it."""
VALUE_BYTES = 256
"""Most bytes of one JSON value besides its text: an object of one member, and its model's part."""
WIDEST_CHARACTER = 4
WIDEST_BODY_FACTOR = 1 + 3 * WIDEST_CHARACTER
"""Copies of a body with a wide character: its bytes, and as wide text, strings and a copy."""
FIRST_BYTES = 1 << 18
"""Charged for the start of a body of unknown length."""
SMALL_PART, LARGE_PART = 1 / 64, 3 / 4


@dataclass(slots=True)
class _Waiter:
    share: Share
    size: int
    granted: asyncio.Future[None]


class RequestMemory:
    """The budget. It is used on the event loop only.

    Requests of up to SMALL_PART of it may use all of it, larger ones only LARGE_PART. So large
    bodies never delay a short question.

    Requests may each hold a part of their needs and wait for the rest. To avoid that deadlock, the
    first waiting request may exceed the budget. The next one may only after all of them are within
    the budget again.

    Args:
        most: bytes.
        on_freed: called with the number of bytes given back.

    Attributes:
        held: bytes that open requests hold or have been granted.
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
        """Return True if a share may grow to that size now."""
        if share is self._favoured:
            return True
        limit = self.most if size <= self._small else self._large_limit
        return self.held - share.size + size <= limit

    def resize(self, share: Share, size: int) -> None:
        """Set the size of a share, whether there is space or not."""
        freed = share.size - size
        self.held -= freed
        share.size = size
        if freed > 0:
            self._on_freed(freed)
            self._grant()

    async def wait(self, share: Share, size: int) -> None:
        """Wait until a share has grown to that size."""
        waiter = _Waiter(share, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._grant()
        try:
            await waiter.granted
        finally:
            if not waiter.granted.done() or waiter.granted.cancelled():
                self._waiting = deque(other for other in self._waiting if other is not waiter)

    def release(self, share: Share) -> None:
        """Give back all of a share."""
        if share is self._favoured:
            self._favoured = None
        self.resize(share, 0)

    def _grant(self) -> None:
        """Let waiting requests grow in order where they fit, and one beyond the budget."""
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
    """One request's share of the budget.

    It is given back when its last user has ended: the request itself, or its work on other threads.

    Attributes:
        size: bytes held.
    """

    def __init__(self, memory: RequestMemory) -> None:
        self.size = 0
        self._memory = memory
        self._users = 1

    def fits(self, size: int) -> bool:
        """Return True if the share can grow to that size without waiting."""
        return size <= self.size or self._memory.fits(self, size)

    async def grow(self, size: int) -> None:
        """Wait until the share holds at least that many bytes."""
        if size > self.size:
            if self._memory.fits(self, size):
                self._memory.resize(self, size)
            else:
                await self._memory.wait(self, size)

    def shrink(self, size: int) -> None:
        """Give back the bytes beyond that size."""
        if size < self.size:
            self._memory.resize(self, size)

    def add_user(self) -> None:
        """Add a user of the share."""
        self._users += 1

    def leave(self) -> None:
        """Remove a user; the last one gives the share back."""
        self._users -= 1
        if not self._users:
            self._memory.release(self)


_current: ContextVar[Share | None] = ContextVar("share", default=None)


def current_share() -> Share | None:
    """Return the share of the current request; None: it has no body, or there is no request."""
    return _current.get()


class Intake:
    """ASGI layer for charging the body of every request to the budget before it is read.

    Args:
        app: the application behind it.
        memory: the budget.
        max_bytes: limit of one body; the route refuses a larger one.
        streamed: paths of routes that hold only the latest bytes of a body.
    """

    def __init__(
        self,
        app: ASGIApp,
        memory: RequestMemory,
        max_bytes: int,
        streamed: Collection[str] = (),
    ) -> None:
        self._app = app
        self._memory = memory
        self._max_bytes = max_bytes
        self._streamed = frozenset(streamed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        declared = _declared(scope)
        if declared == 0:
            _current.set(None)  # a connection's next request inherits the context of the one before
            await self._app(scope, receive, send)
            return
        share = Share(self._memory)
        _current.set(share)
        read, complete = 0, False
        streamed = scope["path"] in self._streamed

        async def counted() -> Message:
            nonlocal read, complete
            if not complete:
                wanted = min(self._max_bytes, max(FIRST_BYTES, 0 if streamed else 2 * read))
                if declared is not None:
                    wanted = min(wanted, declared)
                await share.grow(BODY_FACTOR * wanted)
            message = await receive()
            read += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            share.leave()


def _declared(scope: Scope) -> int | None:
    """Return the declared size of the request's body; None: it is not declared."""
    if scope["type"] != "http":
        return 0
    headers: dict[bytes, bytes] = dict(scope["headers"])
    if b"transfer-encoding" in headers:
        return None
    length = headers.get(b"content-length", b"0")
    return int(length[:19]) if length.isdigit() else None


@dataclass(frozen=True, slots=True)
class BodyCost:
    """Memory of a JSON body, estimated from its bytes.

    Attributes:
        size: bytes of the body.
        wide: it may contain a wide character, which makes a text take four bytes a character.
        values: upper bound of its number of values, at most a few too many.
    """

    size: int
    wide: bool
    values: int

    def to_parse(self) -> int:
        """Return the most bytes while it is parsed: body, text, strings and values."""
        factor = WIDEST_BODY_FACTOR if self.wide else BODY_FACTOR
        return self.size * factor + self.values * VALUE_BYTES

    def when_parsed(self, value: Any) -> int:
        """Return the most bytes after it is parsed: strings and values."""
        strings = _string_bytes(value) if self.wide else self.size
        return strings + self.values * VALUE_BYTES


def _string_bytes(value: Any) -> int:
    """Return the bytes of all characters in a parsed value."""
    total, rest = 0, [value]
    while rest:
        part = rest.pop()
        if isinstance(part, str):
            total += len(part) * (1 if part.isascii() else WIDEST_CHARACTER)
        elif isinstance(part, dict):
            rest += part
            rest += part.values()
        elif isinstance(part, list):
            rest += part
    return total


class FetchedMemory:
    """Holds a share of the budget for every medium, on behalf of the fetching threads.

    A thread without space in the budget waits and does not read, so the bytes stay at their sender.

    Args:
        memory: the budget.
        loop: the event loop on which the budget is used.
        max_seconds: longest that a thread waits for space.
    """

    def __init__(
        self, memory: RequestMemory, loop: asyncio.AbstractEventLoop, max_seconds: float
    ) -> None:
        self._memory, self._loop, self._max_seconds = memory, loop, max_seconds

    @contextlib.contextmanager
    def holding(self, stop: Stop) -> Iterator[Hold]:
        """Yield a function for taking further bytes out of the budget, on a thread other than the
        loop's. The bytes are given back after the block.

        The function raises:
            OverloadedError: there was no space for too long.
            StoppedError: the medium is no longer needed.
        """
        share = Share(self._memory)
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            held += size
            self._grow(share, held, stop)

        try:
            yield hold
        finally:
            if held:
                call_in_loop(self._loop, share.leave)

    def _grow(self, share: Share, size: int, stop: Stop) -> None:
        growing = asyncio.run_coroutine_threadsafe(share.grow(size), self._loop)
        with stop.calling(partial(_cancel, growing.cancel)):
            try:
                growing.result(self._max_seconds)
            except TimeoutError:
                growing.cancel()
                raise OverloadedError(
                    "there is no memory for fetching media at the moment", code="fetch_budget"
                ) from None
            except CancelledError:
                stop.check()
                raise OverloadedError("the server is closing", code="fetch_budget") from None


def _cancel(cancel: Callable[[], bool]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        cancel()


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Call a function on the loop, from any thread; do nothing if the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)
