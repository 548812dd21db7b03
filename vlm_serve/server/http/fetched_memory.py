"""Media that are fetched for requests count into the budget of requests, like their bodies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from functools import partial

from vlm_serve.errors import OverloadedError
from vlm_serve.preprocess.fetch import Hold
from vlm_serve.preprocess.stopping import Stop
from vlm_serve.server.http.request_memory import RequestMemory, Share


class FetchedMemory:
    """Holds a share of the budget for every medium, on behalf of the threads that fetch.

    A thread without room waits and does not read, so that the bytes stay with whoever sends them.

    Args:
        memory: the budget.
        loop: whose thread the budget belongs to.
        max_seconds: most that a thread waits for room.
    """

    def __init__(
        self, memory: RequestMemory, loop: asyncio.AbstractEventLoop, max_seconds: float
    ) -> None:
        self._memory, self._loop, self._max_seconds = memory, loop, max_seconds

    @contextlib.contextmanager
    def holding(self, stop: Stop) -> Iterator[Hold]:
        """Yields what takes bytes more out of the budget, from a thread other than the loop's; they
        are given back after the block. It raises OverloadedError if there is no room for too long,
        and StoppedError if nobody wants the medium any more."""
        share = Share(self._memory)
        mine = 0

        def hold(size: int) -> None:
            nonlocal mine
            mine += size
            self._cover(share, mine, stop)

        try:
            yield hold
        finally:
            if mine:
                tell(self._loop, share.leave)

    def _cover(self, share: Share, size: int, stop: Stop) -> None:
        covering = asyncio.run_coroutine_threadsafe(share.cover(size), self._loop)
        with stop.calling(partial(_cancel, covering.cancel)):
            try:
                covering.result(self._max_seconds)
            except TimeoutError:
                covering.cancel()
                raise OverloadedError(
                    "there is no memory for fetching media at the moment", code="fetch_budget"
                ) from None
            except CancelledError:
                stop.check()
                raise OverloadedError("the server ends", code="fetch_budget") from None


def _cancel(cancel: Callable[[], bool]) -> None:
    with contextlib.suppress(RuntimeError):  # of a loop that has ended
        cancel()


def tell(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
    """From any thread; a loop that has ended needs to know nothing."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(what)
