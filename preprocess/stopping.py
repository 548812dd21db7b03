"""Ends work whose client has left, whatever it waits for, and says what the work has waited for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

from vlm_serve.errors import InvalidRequestError


class StoppedError(InvalidRequestError):
    """Nobody waits for the work any more."""


class Stop:
    """Says once that some work is not wanted any more. Thread-safe.

    Whoever waits inside the work says how to wake it (`calling`); whoever computes asks now and
    then (`check`).

    Attributes:
        is_set: it has been said.
        seconds: what the stages of the work have taken, by name, waiting included. Those of several
            media add up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake: list[Callable[[], None]] = []
        self.is_set = False
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def set(self) -> None:
        """Ends the work: everything registered is called, from this thread."""
        with self._lock:
            self.is_set = True
            for wake in self._wake:
                wake()

    def check(self) -> None:
        """Raises StoppedError if the work is not wanted any more."""
        if self.is_set:
            raise StoppedError("the request was given up")

    @contextlib.contextmanager
    def calling(self, wake: Callable[[], None]) -> Iterator[None]:
        """Has `wake` called if the stop comes inside the block (or came before), never after it.

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
        """Counts the time of the block, whatever way it ends."""
        start = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[stage] += time.monotonic() - start
