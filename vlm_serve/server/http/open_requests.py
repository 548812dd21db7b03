"""Counting open requests, to wait for them at shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator


class OpenRequests:
    """Counter of open requests. It is used on the event loop only.

    Attributes:
        draining: the server takes no new work.
        num_open: requests that were admitted and have not ended.
        on_drain: called when the server begins to wait for them.
    """

    def __init__(self) -> None:
        self.draining = False
        self.num_open = 0
        self.on_drain: Callable[[], None] = lambda: None
        self._all_done = asyncio.Event()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count one request as open inside the block."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._all_done.set()

    async def drain(self, timeout: float) -> bool:
        """Stop taking new work and wait for open requests; return True if all ended in time."""
        self.draining = True
        self.on_drain()
        deadline = time.monotonic() + timeout
        while self.num_open and (left := deadline - time.monotonic()) > 0:
            self._all_done.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_done.wait(), left)
        return not self.num_open
