"""The tokens of a stream that its client has not taken yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vlm_serve.engine.requests.outputs import Delta

MAX_UNREAD = 256
"""Tokens of each choice that wait for their client when the request is suspended."""


class UnreadDeltas:
    """A queue with one reader, who takes all of it at once. It tells when too much of it is unread.

    Args:
        most: deltas that are too many.
        interval: least seconds from one taking to the next; what has ended may be taken at once.

    Attributes:
        on_change: called with True when too many deltas wait, with False when they are taken.
        direct: takes deltas in place of a waiting reader, or returns False. What has ended is the
            reader's, and so is an error of this.
    """

    def __init__(self, most: int, interval: float = 0.0) -> None:
        self.on_change: Callable[[bool], None] = lambda full: None
        self.direct: Callable[[list[Delta]], bool] | None = None
        self._most, self._interval = most, interval
        self._deltas: list[Delta] = []
        self._reader: asyncio.Future[None] | None = None
        self._early = self._full = self._ended = False

    def put(self, delta: Delta) -> None:
        """Add a delta, and have it taken."""
        self.add(delta)
        self.settle()

    def add(self, delta: Delta) -> None:
        """Add a delta; `settle` has to follow. Of a prompt's progress the latest is kept."""
        if delta.progress is not None and self._deltas and self._deltas[-1].progress is not None:
            self._deltas.pop()
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            self._ended = True
        if not self._full and len(self._deltas) >= self._most:
            self._full = True
            self.on_change(True)

    def settle(self) -> None:
        """Have the deltas taken if the reader waits for them and the interval is over."""
        reader = self._reader
        if reader is None or reader.done() or not self._deltas:
            return
        if self._early and not self._ended:
            return  # until a timer ends the interval
        try:
            if self.direct is not None and not self._ended and self.direct(self._deltas):
                self._taken()
                return
        except Exception as error:
            reader.set_exception(error)
            return
        reader.set_result(None)

    async def take(self) -> list[Delta]:
        """Wait for deltas, until the interval is over, and take all."""
        while not self._deltas or (self._early and not self._ended):
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._taken()

    def _over(self) -> None:
        self._early = False
        self.settle()

    def _taken(self) -> list[Delta]:
        deltas, self._deltas, self._ended = self._deltas, [], False
        if self._interval and not self._early:
            self._early = True
            asyncio.get_running_loop().call_later(self._interval, self._over)
        if self._full:
            self._full = False
            self.on_change(False)
        return deltas
