"""From the engine's thread to the event loop.

A step ends with one callback per running sequence. Waking the loop costs a system call, and its
work the processor that the next step has begun to use: what is posted while a wake-up is already on
its way travels with it, and what nobody waits for does without one of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque

from vlm_serve.engine.outputs import Delta

PATIENT_SECONDS = 0.25
"""How often deltas that nobody waits for wake the loop at most, for the sake of its counts."""


class Mailbox:
    """Carries deltas into asyncio queues. `post` may be called from any thread and never blocks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[asyncio.Queue[Delta], Delta]] = deque()
        self._awaited = False
        self._delivered = 0.0

    def post(self, queue: asyncio.Queue[Delta], delta: Delta, *, patient: bool = False) -> None:
        """Puts a delta into a queue of the loop's, in order with what was posted before.

        Args:
            patient: whoever reads the queue waits for the last delta of a choice.
        """
        self._letters.append((queue, delta))
        late = delta.time >= self._delivered + PATIENT_SECONDS
        urgent = not patient or delta.finish_reason is not None or late
        if urgent and not self._awaited:
            self._awaited = True
            # The loop may be closed already: then nobody reads the queue either.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Reset first: a letter that arrives from here on gets a wake-up of its own.
        self._awaited, self._delivered = False, time.monotonic()
        while self._letters:
            queue, delta = self._letters.popleft()
            queue.put_nowait(delta)
