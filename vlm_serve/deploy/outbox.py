"""Outboxes of a replica: messages of answers, queued for their gateways.

The output of a step for one gateway is one batch. After a request's first text, its
messages of a few milliseconds are merged into one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from starlette.types import Message

from vlm_serve.server.failover.attempt import merged

PACE_SECONDS = 0.01
"""Least time between two batches, unless the next one has the first text of a request."""
UNREAD_SECONDS = 60.0
"""An outbox unread for this long belongs to a gateway that is gone, and is dropped."""

NumberedMessage = tuple[int, Message | None]
"""A request's number and a message of its answer; None ends the answer."""

BEGUN: Message = {"type": "vlm_serve.begun"}
"""First message of every request: it tells the gateway which replica has the request."""


class Outbox:
    """Queue of messages for one gateway. For one event loop.

    Attributes:
        read: monotonic time of the gateway's last read.
        closed: nothing more comes; waiting readers are woken.
    """

    def __init__(self) -> None:
        self.read = time.monotonic()
        self.closed = False
        self._messages: dict[int, list[Message | None]] = {}
        self._with_text: set[int] = set()
        self._sent = 0.0
        self._filled = asyncio.Event()
        self._urgent = asyncio.Event()

    def put(self, number: int, message: Message | None) -> None:
        if self.closed:
            return
        self._messages.setdefault(number, []).append(message)
        if message is None:
            self._with_text.discard(number)
        elif number not in self._with_text and message.get("body"):
            self._with_text.add(number)
            self._urgent.set()
        self._filled.set()

    def close(self) -> None:
        self.closed = True
        self._filled.set()
        self._urgent.set()

    async def take(self, seconds: float) -> list[NumberedMessage]:
        """Take all queued messages, in order within each request; none after the timeout."""
        self.read = time.monotonic()
        if not await _wait(self._filled, seconds):
            return []
        await _wait(self._urgent, self._sent + PACE_SECONDS - time.monotonic())
        await asyncio.sleep(0)  # lets the other requests of the same step queue their messages
        self._sent = time.monotonic()
        self._filled.clear()
        self._urgent.clear()
        queued, self._messages = self._messages, {}
        return [(number, each) for number, messages in queued.items() for each in _merge(messages)]


class Outboxes:
    """The outboxes of all gateways, by name."""

    def __init__(self) -> None:
        self._all: dict[str, Outbox] = {}

    def __getitem__(self, gateway: str) -> Outbox:
        if gateway not in self._all:
            now = time.monotonic()
            old = [name for name, outbox in self._all.items() if now - outbox.read > UNREAD_SECONDS]
            for name in old:
                del self._all[name]
            self._all[gateway] = Outbox()
        return self._all[gateway]

    def close(self) -> None:
        """Close all outboxes: gateways send unanswered requests to other replicas."""
        for outbox in self._all.values():
            outbox.close()


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, at most so long. Return True if it is set."""
    if not event.is_set() and seconds > 0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
    return event.is_set()


def _merge(messages: Sequence[Message | None]) -> list[Message | None]:
    """Merge the parts of a body into one message."""
    parts = [each for each in messages if each and each["type"] == "http.response.body"]
    if len(parts) < 2:
        return list(messages)
    head = messages[: messages.index(parts[0])]
    return [*head, merged(parts), *([None] if messages[-1] is None else [])]
