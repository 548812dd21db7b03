"""Work of one request on threads that all share: a few pieces at a time, the others in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Runs pieces of work in order, so many at a time. Whoever brings hundreds of them takes some
    of the executor's threads, and others that come meanwhile need not wait for all of them.

    Args:
        executor: what runs them. Once it takes no more work, what is left is cancelled.
        works: the pieces.
        most: of them at a time.

    Attributes:
        futures: what came of the pieces. One that is cancelled before its turn is passed over.
    """

    def __init__(self, executor: Executor, works: Sequence[Callable[[], T]], most: int) -> None:
        self._executor = executor
        self.futures: list[Future[T]] = [Future() for _ in works]
        self._left = list(zip(self.futures, works, strict=True))[::-1]
        self._lock = threading.Lock()
        for _ in range(min(most, len(works))):
            self._begin_next()

    def _begin_next(self) -> None:
        with self._lock:
            while self._left and self._left[-1][0].cancelled():
                self._left.pop()
            if not self._left:
                return
            future, work = self._left.pop()
        try:
            turn = self._executor.submit(self._run, future, work)
        except RuntimeError:  # it has been shut down
            self._give_up(future)
            return

        def ended(turn: Future[None]) -> None:
            if turn.cancelled():
                self._give_up(future)

        turn.add_done_callback(ended)

    def _run(self, future: Future[T], work: Callable[[], T]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        finally:
            self._begin_next()

    def _give_up(self, future: Future[T]) -> None:
        """Cancels a piece and all that are left. Calls nothing of the executor, which may be in the
        middle of its shutdown."""
        with self._lock:
            left, self._left = self._left, []
        for each in (future, *(other for other, _ in left)):
            each.cancel()
