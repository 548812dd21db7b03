"""From the engine's thread to the event loop.

A step ends with one callback per running sequence. Waking the loop costs a system call, so what is
posted while a wake-up is already on its way travels with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from vlm_serve.engine.outputs import Delta


class Mailbox:
    """Carries deltas into asyncio queues. `post` may be called from any thread and never blocks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[asyncio.Queue[Delta], Delta]] = deque()
        self._awaited = False

    def post(self, queue: asyncio.Queue[Delta], delta: Delta) -> None:
        self._letters.append((queue, delta))
        if not self._awaited:
            self._awaited = True
            # The loop may be closed already: then nobody reads the queue either.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Reset first: a letter that arrives from here on gets a wake-up of its own.
        self._awaited = False
        while self._letters:
            queue, delta = self._letters.popleft()
            queue.put_nowait(delta)
