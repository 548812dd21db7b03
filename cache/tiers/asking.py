"""How a store is asked: for so long and no longer, and not again right after it has failed."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from vlm_serve.cache.tiers.store import Store

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_A = TypeVar("_A")

REST_SECONDS = 10.0
"""How long a store is left alone after it has failed."""
LONGEST_REST = 8
"""Times that, if it fails whenever it is tried again."""
SLOW_SHARE = 0.5
"""A call that takes more of its time limit than that is slow."""
MOST_SLOW = 3
"""Slow calls in a row after which a store is left alone."""


@dataclass
class Patience:
    """What one request has waited for lower tiers so far: a store's time limit is for all of it.

    Attributes:
        spent: seconds.
    """

    spent: float = 0.0


Turn = Literal["call", "probe"]


class Breaker:
    """Whether a store is asked: closed, everybody may; open, nobody; when it has rested, one call
    decides. Times are seconds of any one clock."""

    def __init__(self, rest_seconds: float) -> None:
        self._rest = self._next_rest = rest_seconds
        self._open_until: float | None = None
        self._probing = False
        self._num_slow = 0

    def admit(self, now: float) -> Turn | None:
        """What may begin, if anything; `ended` is to be called for it."""
        if self._open_until is None:
            return "call"
        if now < self._open_until or self._probing:
            return None
        self._probing = True
        return "probe"

    def ended(self, turn: Turn, now: float, *, failed: bool, slow: bool = False) -> bool:
        """Takes in how a call went; True if the breaker has opened."""
        probe = turn == "probe"
        if probe:
            self._probing = False
        elif self._open_until is not None:
            return False  # it began before the breaker opened
        self._num_slow = self._num_slow + 1 if slow else 0
        if failed or self._num_slow >= MOST_SLOW or (probe and slow):
            self._open_until = now + self._next_rest
            self._next_rest = min(2 * self._next_rest, LONGEST_REST * self._rest)
            self._num_slow = 0
            return True
        if probe:
            self._open_until, self._next_rest = None, self._rest
        return False


class Asker:
    """Calls stores on their thread.

    Args:
        counts: "failed_*" is counted here, by the store's name, and "opened_*", "skipped_*": it was
            left alone, and calls that it was spared.
        rest_seconds: how long a store is left alone after a failure; None: neither that nor limits
            (simulations, in which no time passes).
    """

    def __init__(self, counts: Counter[str], rest_seconds: float | None) -> None:
        self._counts = counts
        self._rest_seconds = rest_seconds
        self._breakers: dict[Store, Breaker] = {}

    async def ask(
        self,
        store: Store,
        call: Callable[[_A], Awaitable[_T]],
        what: _A,
        *,
        since: float | None = None,
        limit: float | None = None,
    ) -> _T | None:
        """What a store answers; None if it fails, is too slow or has been lately, or if the time is
        over already.

        Args:
            since: when the time that it has began, by the loop's clock; None: now.
            limit: seconds; None: the store's own.
        """
        if self._rest_seconds is None:
            try:
                return await call(what)
            except Exception:
                self._counts[f"failed_{store.name}"] += 1
                _log.exception("the cache tier %r failed", store.name)
                return None
        loop, limit = asyncio.get_running_loop(), store.time_limit if limit is None else limit
        began = loop.time()
        breaker = self._breakers.setdefault(store, Breaker(self._rest_seconds))
        deadline = (began if since is None else since) + limit
        turn = breaker.admit(began) if began < deadline else None
        if turn is None:
            self._counts[f"skipped_{store.name}"] += 1
            return None
        failed = slow = False
        try:
            async with asyncio.timeout_at(deadline):
                answer = await call(what)
            slow = loop.time() - began > SLOW_SHARE * limit
            return answer
        except Exception as error:
            failed = True
            self._counts[f"failed_{store.name}"] += 1
            known = isinstance(error, OSError)  # broken connections and time-outs are
            _log.warning(
                "the cache tier %r failed (%s); it is left alone for a while",
                store.name,
                str(error) or type(error).__name__,
                exc_info=None if known else error,
            )
            return None
        finally:
            if breaker.ended(turn, loop.time(), failed=failed, slow=slow):
                self._counts[f"opened_{store.name}"] += 1
