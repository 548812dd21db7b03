"""Counting fetched media against the budget of requests, as their bodies are."""

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
    """Holds a share of the budget for every medium, on behalf of the fetching threads.

    A thread without space in the budget waits and does not read, so the bytes stay at their sender.

    Args:
        memory: the budget.
        loop: the event loop on which the budget is used.
        max_seconds: longest that a thread waits for space.
    """

    def __init__(
        self, memory: RequestMemory, loop: asyncio.AbstractEventLoop, max_seconds: float
    ) -> None:
        self._memory, self._loop, self._max_seconds = memory, loop, max_seconds

    @contextlib.contextmanager
    def holding(self, stop: Stop) -> Iterator[Hold]:
        """Yield a function for taking further bytes out of the budget, on a thread other than the
        loop's. The bytes are given back after the block.

        The function raises:
            OverloadedError: there was no space for too long.
            StoppedError: the medium is no longer needed.
        """
        share = Share(self._memory)
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            held += size
            self._grow(share, held, stop)

        try:
            yield hold
        finally:
            if held:
                call_in_loop(self._loop, share.leave)

    def _grow(self, share: Share, size: int, stop: Stop) -> None:
        growing = asyncio.run_coroutine_threadsafe(share.grow(size), self._loop)
        with stop.calling(partial(_cancel, growing.cancel)):
            try:
                growing.result(self._max_seconds)
            except TimeoutError:
                growing.cancel()
                raise OverloadedError(
                    "there is no memory for fetching media at the moment", code="fetch_budget"
                ) from None
            except CancelledError:
                stop.check()
                raise OverloadedError("the server is closing", code="fetch_budget") from None


def _cancel(cancel: Callable[[], bool]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        cancel()


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Call a function on the loop, from any thread; do nothing if the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)
