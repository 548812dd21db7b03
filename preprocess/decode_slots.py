"""Slots for decoding: a bound on concurrent decodes, and the order of those that wait."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from vlm_serve.errors import EngineClosedError
from vlm_serve.preprocess.stopping import Stop

# Waiting decodes are served by arrival time plus a penalty: one second for this many bytes of file.
_BYTES_PER_SECOND = 1 << 20


class DecodeSlots:
    """A fixed number of slots for decoding. Thread-safe.

    Args:
        count: number of slots.

    Attributes:
        busy: slots in use.
        waiting: callers waiting for a slot.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._queue: list[tuple[float, object]] = []
        self._closed = False
        self.busy = 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def close(self) -> None:
        """Fail all waiters with EngineClosedError and wait until no slot is in use."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.busy)

    @contextlib.contextmanager
    def acquire(self, num_bytes: int, stop: Stop) -> Iterator[None]:
        """Hold a slot for the block. Raises StoppedError, EngineClosedError."""
        self._acquire(num_bytes, stop)
        try:
            yield
        finally:
            with self._changed:
                self.busy -= 1
                self._changed.notify_all()

    def _acquire(self, num_bytes: int, stop: Stop) -> None:
        ticket = (time.monotonic() + num_bytes / _BYTES_PER_SECOND, object())

        def is_next() -> bool:
            first = min(self._queue, key=lambda each: each[0])
            return stop.is_set or self._closed or (self.busy < self._count and first is ticket)

        def wake() -> None:
            with self._changed:
                self._changed.notify_all()

        with stop.timed("place"), stop.calling(wake), self._changed:
            self._queue.append(ticket)
            try:
                self._changed.wait_for(is_next)
                stop.check()
                if self._closed:
                    raise EngineClosedError("the engine is closed")
                self.busy += 1
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()
