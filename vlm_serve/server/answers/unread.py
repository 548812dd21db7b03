"""The tokens of a stream that its client has not taken yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vlm_serve.engine.requests.outputs import Delta

MAX_UNREAD = 256
"""Tokens of each choice that wait for their client when the request is suspended."""


class UnreadDeltas(asyncio.Queue[Delta]):
    """A queue that tells when too much of it is unread, and when half of that has been read.

    Args:
        most: deltas that are too many.

    Attributes:
        on_change: called with True when too many deltas wait, with False when few do again.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self.on_change: Callable[[bool], None] = lambda full: None
        self._full = False

    def _put(self, item: Delta) -> None:
        super()._put(item)
        if not self._full and self.qsize() >= self._most:
            self._full = True
            self.on_change(True)

    def _get(self) -> Delta:
        delta = super()._get()
        if self._full and self.qsize() <= self._most // 2:
            self._full = False
            self.on_change(False)
        return delta
