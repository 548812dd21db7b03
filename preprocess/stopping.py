"""Cancels a request's work wherever it waits, and measures the time of its stages."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

from vlm_serve.errors import InvalidRequestError


class StoppedError(InvalidRequestError):
    """The work was cancelled: its result is no longer wanted."""


class Stop:
    """A one-shot cancellation signal for some work. Thread-safe.

    Blocking code inside the work registers how to wake it (`calling`). Computing code polls now and
    then (`check`).

    Attributes:
        is_set: the work has been cancelled.
        seconds: time taken by each stage of the work, waiting included, by name. Several media add
            up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake: list[Callable[[], None]] = []
        self.is_set = False
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def set(self) -> None:
        """Cancel the work: call everything registered, from this thread."""
        with self._lock:
            self.is_set = True
            for wake in self._wake:
                wake()

    def check(self) -> None:
        """Raise StoppedError if the work has been cancelled."""
        if self.is_set:
            raise StoppedError("the request was cancelled")

    @contextlib.contextmanager
    def calling(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call `wake` if the stop is set inside the block or was set before it, never after it.

        `wake` must not block, raise or use this object.
        """
        with self._lock:
            if self.is_set:
                wake()
            self._wake.append(wake)
        try:
            yield
        finally:
            with self._lock:
                self._wake.remove(wake)

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage, however the block ends."""
        start = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[stage] += time.monotonic() - start
