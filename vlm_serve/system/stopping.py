"""Cancels a request's work wherever it waits, measures the time of its stages, and limits how much
of it runs at a time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

from vlm_serve.errors import InvalidRequestError

T = TypeVar("T")


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


class ConcurrencyLimiter(Generic[T]):
    """Runs tasks in order on an executor, at most `limit` at a time.

    A request with hundreds of tasks occupies only some of the executor's threads, so other requests
    do not wait for all of them.

    Args:
        executor: runs the tasks. Once it rejects new ones, all queued tasks are cancelled.
        tasks: the tasks, in order.
        limit: maximum number of tasks submitted at a time.

    Attributes:
        futures: one per task. A task whose future is cancelled before its start is skipped.
    """

    def __init__(self, executor: Executor, tasks: Sequence[Callable[[], T]], limit: int) -> None:
        self._executor = executor
        self.futures: list[Future[T]] = [Future() for _ in tasks]
        self._queued = list(zip(self.futures, tasks, strict=True))[::-1]
        self._lock = threading.Lock()
        for _ in range(min(limit, len(tasks))):
            self._start_next()

    def _start_next(self) -> None:
        with self._lock:
            while self._queued and self._queued[-1][0].cancelled():
                self._queued.pop()
            if not self._queued:
                return
            future, task = self._queued.pop()
        try:
            running = self._executor.submit(self._run, future, task)
        except RuntimeError:  # it has been shut down
            self._cancel(future)
            return

        def ended(running: Future[None]) -> None:
            if running.cancelled():
                self._cancel(future)

        running.add_done_callback(ended)

    def _run(self, future: Future[T], task: Callable[[], T]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(task())
        except BaseException as error:
            future.set_exception(error)
        finally:
            self._start_next()

    def _cancel(self, future: Future[T]) -> None:
        """Cancel a future and all queued ones.

        Calls no method of the executor, which may be in the middle of its shutdown.
        """
        with self._lock:
            queued, self._queued = self._queued, []
        for cancelled in (future, *(other for other, _ in queued)):
            cancelled.cancel()
