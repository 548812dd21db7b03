"""Carrying deltas from the engine's thread to the event loop.

A step ends with one callback for each running sequence. Waking the loop costs a system call, and
its work takes processor time from the new step. So deltas posted while a wake-up is
pending share it, and deltas for patient readers do not cause one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque

from vlm_serve.engine.outputs import Delta

PATIENT_SECONDS = 0.25
"""Least time between wake-ups for patient readers, which keep the loop's counters fresh."""


class Mailbox:
    """Carries deltas into asyncio queues. `post` is thread-safe and never blocks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posted: deque[tuple[asyncio.Queue[Delta], Delta]] = deque()
        self._waking = False
        self._delivered = 0.0

    def post(self, queue: asyncio.Queue[Delta], delta: Delta, *, patient: bool = False) -> None:
        """Put a delta into a queue of the loop, in the order of posting.

        Args:
            patient: the queue's reader only needs the last delta of each choice in time.
        """
        self._posted.append((queue, delta))
        late = delta.time >= self._delivered + PATIENT_SECONDS
        urgent = not patient or delta.finish_reason is not None or late
        if urgent and not self._waking:
            self._waking = True
            # A closed loop has no readers either.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Reset first, so that a delta posted from here on causes another wake-up.
        self._waking, self._delivered = False, time.monotonic()
        while self._posted:
            queue, delta = self._posted.popleft()
            queue.put_nowait(delta)
