"""Limits how many tasks of one request run at a time on a shared executor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

T = TypeVar("T")


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
        for each in (future, *(other for other, _ in queued)):
            each.cancel()
