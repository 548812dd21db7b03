"""How a store is asked: for so long and no longer, and not again right after it has failed."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from vlm_serve.cache.tiers.store import Store

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_A = TypeVar("_A")

REST_SECONDS = 10.0
"""How long a store is left alone after it has failed."""


class Asker:
    """Calls stores on their thread.

    Args:
        counts: "failed_*" is counted here, by the store's name.
        rest_seconds: how long a store is left alone after a failure; None: neither that nor limits
            (simulations, in which no time passes).
    """

    def __init__(self, counts: Counter[str], rest_seconds: float | None) -> None:
        self._counts = counts
        self._rest_seconds = rest_seconds
        self._resting: set[Store] = set()

    async def ask(self, store: Store, call: Callable[[_A], Awaitable[_T]], what: _A) -> _T | None:
        """What a store answers; None if it fails, is too slow or has been lately."""
        if store in self._resting:
            return None
        try:
            if self._rest_seconds is None:
                return await call(what)
            async with asyncio.timeout(store.time_limit):
                return await call(what)
        except Exception:
            self._counts[f"failed_{store.name}"] += 1
            if self._rest_seconds is not None:
                self._resting.add(store)
                loop = asyncio.get_running_loop()
                loop.call_later(self._rest_seconds, self._resting.discard, store)
            _log.exception("the cache tier %r failed; it is left alone for a while", store.name)
            return None
