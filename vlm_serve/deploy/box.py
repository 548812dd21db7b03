"""The boxes of a replica, in which answers wait to be sent to the front that asked.

All that a step gives to all requests of a front is one batch; and what a request says within a few
milliseconds is one letter, after its first words.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from starlette.types import Message

from vlm_serve.server.failover.attempt import merged

PACE_SECONDS = 0.01
"""From one batch to the next one, if it has no request's first words in it."""
UNREAD_SECONDS = 60.0
"""A front whose link nobody has read for so long is gone, and what waits for it is thrown away."""

Letter = tuple[int, Message | None]
"""The number of a request, and a message of its answer; None: there is nothing more."""

BEGUN: Message = {"type": "vlm_serve.begun"}
"""The first letter of every request: who reads it knows which replica has it."""


class Box:
    """What waits for one front. All on one event loop.

    Attributes:
        read: monotonic time at which the front last took something.
        closed: nothing more comes, and who waits is told so.
    """

    def __init__(self) -> None:
        self.read = time.monotonic()
        self.closed = False
        self._letters: dict[int, list[Message | None]] = {}
        self._said: set[int] = set()
        self._sent = 0.0
        self._filled = asyncio.Event()
        self._urgent = asyncio.Event()

    def put(self, number: int, message: Message | None) -> None:
        if self.closed:
            return
        self._letters.setdefault(number, []).append(message)
        if message is None:
            self._said.discard(number)
        elif number not in self._said and message.get("body"):
            self._said.add(number)
            self._urgent.set()
        self._filled.set()

    def close(self) -> None:
        self.closed = True
        self._filled.set()
        self._urgent.set()

    async def take(self, seconds: float) -> list[Letter]:
        """Everything that waits, in its order within each request; at the latest after that time:
        then there may be nothing."""
        self.read = time.monotonic()
        if not await _happens(self._filled, seconds):
            return []
        await _happens(self._urgent, self._sent + PACE_SECONDS - time.monotonic())
        await asyncio.sleep(0)  # what the same step gives to others comes within this turn
        self._sent = time.monotonic()
        self._filled.clear()
        self._urgent.clear()
        letters, self._letters = self._letters, {}
        return [(number, each) for number, said in letters.items() for each in _in_brief(said)]


class Boxes:
    """The boxes of all fronts."""

    def __init__(self) -> None:
        self._all: dict[str, Box] = {}

    def __getitem__(self, front: str) -> Box:
        if front not in self._all:
            now = time.monotonic()
            old = [name for name, box in self._all.items() if now - box.read > UNREAD_SECONDS]
            for name in old:
                del self._all[name]
            self._all[front] = Box()
        return self._all[front]

    def close(self) -> None:
        """Says no more: fronts take what is unanswered elsewhere."""
        for box in self._all.values():
            box.close()


async def _happens(event: asyncio.Event, seconds: float) -> bool:
    """Whether it has happened, or does within that time."""
    if not event.is_set() and seconds > 0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
    return event.is_set()


def _in_brief(messages: Sequence[Message | None]) -> list[Message | None]:
    """The same with the parts of the body as one."""
    parts = [each for each in messages if each and each["type"] == "http.response.body"]
    if len(parts) < 2:
        return list(messages)
    head = messages[: messages.index(parts[0])]
    return [*head, merged(parts), *([None] if messages[-1] is None else [])]
