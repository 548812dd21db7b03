"""Calls of stores: within a time limit, only while the store is open, and not right after a
failure."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, TypeVar

from vlm_serve.cache.tiers.entry import EntryId
from vlm_serve.cache.tiers.store import READ_LIMIT, Store

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_A = TypeVar("_A")

REST_SECONDS = 10.0
"""Pause after a store's failure."""
LONGEST_REST = 8
"""Longest pause after repeated failures, as a multiple of the first."""
SLOW_SHARE = 0.5
"""A call that takes a larger share of its time limit is slow."""
MOST_SLOW = 3
"""Slow calls in a row that open the breaker."""
MOST_LETTERS = 300
"""Longest logged part of an error's message, in characters."""
OPEN_SECONDS = 5.0
"""Time limit for opening a store; a start waits for it once, for all stores together."""


@dataclass
class WaitBudget:
    """The time that one request has waited for lower tiers: a store's time limit covers all of it.

    Attributes:
        spent: seconds.
    """

    spent: float = 0.0


CallKind = Literal["call", "probe"]


class Breaker:
    """A circuit breaker for one store. Closed: every call is allowed. Open: none is. After a
    pause one call probes the store, unless it has been seen to answer. Times are seconds of any
    one clock."""

    def __init__(self, rest_seconds: float) -> None:
        self._rest = self._next_rest = rest_seconds
        self._open_until: float | None = None
        self._probing = False
        self._num_slow = 0

    def admit(self, now: float) -> CallKind | None:
        """Return the kind of call that may start, or None; pass it to `ended`."""
        if self._open_until is None:
            return "call"
        if now < self._open_until or self._probing:
            return None
        self._probing = True
        return "probe"

    def ended(self, kind: CallKind, now: float, *, failed: bool, slow: bool = False) -> bool:
        """Record the outcome of a call; return True if the breaker has opened."""
        probe = kind == "probe"
        if probe:
            self._probing = False
        elif self._open_until is not None:
            return False  # the call began before the breaker opened
        self._num_slow = self._num_slow + 1 if slow else 0
        if failed or self._num_slow >= MOST_SLOW or (probe and slow):
            self.rest(now)
            return True
        if not slow:
            self._open_until, self._next_rest = None, self._rest
        return False

    def rest(self, now: float) -> None:
        """Open, or stay open for longer, because the store is unusable now."""
        self._open_until = now + self._next_rest
        self._next_rest = min(2 * self._next_rest, LONGEST_REST * self._rest)
        self._num_slow = 0

    def answered(self) -> None:
        """Close, because the store answers. Only a successful call shows that it works too, so the
        next pause is not shortened before one."""
        self._open_until = None

    @property
    def is_open(self) -> bool:
        return self._open_until is not None

    def seconds_left(self, now: float) -> float:
        """Return how many seconds the store stays dropped."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - now)


class StoreCaller:
    """Calls stores on their thread.

    Args:
        counts: counters by the store's name: "failed_*" calls, "opened_*" breakers and "skipped_*"
            calls.
        rest_seconds: pause after a failure.
    """

    def __init__(self, counts: Counter[str], rest_seconds: float) -> None:
        self._counts = counts
        self._rest_seconds = rest_seconds
        self._breakers: dict[Store, Breaker] = {}
        self._failed: dict[Store, asyncio.Event] = {}
        self._closed: set[Store] = set()

    def is_up(self, store: Store) -> bool:
        """Return True if the store is in use now. Any thread may call it."""
        breaker = self._breakers.get(store)
        return store not in self._closed and (breaker is None or not breaker.is_open)

    async def tend(
        self,
        store: Store,
        opened: Callable[[Collection[EntryId]], None],
        tried: Future[None],
    ) -> None:
        """Open a store, retrying until it succeeds, and again after each failed call; until then
        it is not called. Problems are counted and logged once. Runs until it is cancelled.

        Args:
            opened: called with the ids that the store holds, each time that it opens.
            tried: completed after the first attempt.
        """
        self._closed.add(store)
        loop, problem = asyncio.get_running_loop(), ""
        failed = self._failed.setdefault(store, asyncio.Event())
        where = f"the cache tier {store.name!r} ({store.place})"
        while True:
            failed.clear()
            try:
                async with asyncio.timeout(OPEN_SECONDS):
                    known = await store.open()
            except Exception as error:
                self._breaker(store).rest(loop.time())
                self._counts[f"failed_{store.name}"] += not problem
                if problem != (problem := line_of(error)):
                    complaint = f"{where} cannot be used ({problem})"
                    then = "the server works without it and tries again"
                    _log.warning("%s: %s", complaint, then, exc_info=unknown(error))
                is_open = False
            else:
                self._closed.discard(store)
                if store in self._breakers:
                    self._breakers[store].answered()
                opened(known)
                if problem:
                    _log.info("%s is used from now on", where)
                is_open = True
            if not tried.done():
                tried.set_result(None)
            if is_open:
                await failed.wait()
                problem = "it has failed"
            await asyncio.sleep(self._breaker(store).seconds_left(loop.time()))

    async def call(
        self,
        store: Store,
        call: Callable[[_A], Awaitable[_T]],
        argument: _A,
        *,
        since: float | None = None,
        limit: float | None = None,
    ) -> _T | None:
        """Call a store. Return None if it fails, is too slow, is paused or not open, or if the
        time is up.

        Args:
            since: start of the time limit, by the loop's clock; None: now.
            limit: seconds; None: the store's own.
        """
        loop, limit = asyncio.get_running_loop(), store.time_limit if limit is None else limit
        began, breaker = loop.time(), self._breaker(store)
        deadline = (began if since is None else since) + limit
        may_call = began < deadline and store not in self._closed
        kind = breaker.admit(began) if may_call else None
        if kind is None:
            self._counts[f"skipped_{store.name}"] += 1
            return None
        failed = slow = False
        try:
            async with asyncio.timeout_at(deadline):
                answer = await call(argument)
            slow = loop.time() - began > SLOW_SHARE * limit
            return answer
        except Exception as error:
            failed = True
            self._counts[f"failed_{store.name}"] += 1
            text = f"the cache tier {store.name!r} failed ({line_of(error)})"
            _log.warning("%s; it is paused for a while", text, exc_info=unknown(error))
            return None
        finally:
            if breaker.ended(kind, loop.time(), failed=failed, slow=slow):
                self._counts[f"opened_{store.name}"] += 1
                if store in self._failed:
                    self._failed[store].set()

    async def ask(
        self,
        store: Store,
        call: Callable[[_A], Awaitable[_T]],
        argument: _A,
        since: float | None,
    ) -> _T | None:
        """Call a store for a request that waits for it, as `call` does, for READ_LIMIT at most."""
        limit = min(store.time_limit, READ_LIMIT)
        return await self.call(store, call, argument, since=since, limit=limit)

    def _breaker(self, store: Store) -> Breaker:
        return self._breakers.setdefault(store, Breaker(self._rest_seconds))


def unknown(error: Exception) -> Exception | None:
    """Return the error if its traceback belongs into the log; broken connections and timeouts need
    none."""
    return None if isinstance(error, OSError) else error


def line_of(error: Exception) -> str:
    """Return an error's message as one short line; its text may come from other machines."""
    if isinstance(error, TimeoutError) and not str(error):
        return "it does not answer"
    text = " ".join(str(error)[:MOST_LETTERS].split()).rstrip(".")
    return (
        "".join(character if character.isprintable() else "?" for character in text)
        or type(error).__name__
    )
