"""Who may decode now: so many at a time, and in which order the others come."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from vlm_serve.errors import EngineClosedError
from vlm_serve.preprocess.stopping import Stop

# Who waits is served in the order of arrival, as if a file of so many bytes came a second later.
_BYTES_PER_SECOND = 1 << 20


class Places:
    """So many places for decoding. Thread-safe.

    Args:
        most: of them.

    Attributes:
        busy, waiting: how many have one, and how many wait for one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._turns: list[tuple[float, object]] = []
        self._closed = False
        self.busy = 0

    @property
    def waiting(self) -> int:
        return len(self._turns)

    def close(self) -> None:
        """Who waits is told that the engine is closed. Returns when no place is taken any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.busy)

    @contextlib.contextmanager
    def taken(self, num_bytes: int, stop: Stop) -> Iterator[None]:
        """A place for the block. Raises StoppedError, EngineClosedError."""
        self._take(num_bytes, stop)
        try:
            yield
        finally:
            with self._changed:
                self.busy -= 1
                self._changed.notify_all()

    def _take(self, num_bytes: int, stop: Stop) -> None:
        mine = (time.monotonic() + num_bytes / _BYTES_PER_SECOND, object())

        def is_next() -> bool:
            first = min(self._turns, key=lambda turn: turn[0])
            return stop.is_set or self._closed or (self.busy < self._most and first is mine)

        def wake() -> None:
            with self._changed:
                self._changed.notify_all()

        with stop.timed("place"), stop.calling(wake), self._changed:
            self._turns.append(mine)
            try:
                self._changed.wait_for(is_next)
                stop.check()
                if self._closed:
                    raise EngineClosedError("the engine is closed")
                self.busy += 1
            finally:
                self._turns.remove(mine)
                self._changed.notify_all()
