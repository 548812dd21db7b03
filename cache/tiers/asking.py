"""How a store is asked: for so long and no longer, not before it is open, and not again right after
it has failed."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, TypeVar

from vlm_serve.cache.tiers.entry import EntryId
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
MOST_LETTERS = 300
"""Of what an error says that are logged."""
OPEN_SECONDS = 5.0
"""How long a store may take to open; a start waits for that, once for all of them together."""


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
    decides, or somebody has seen that it answers. Times are seconds of any one clock."""

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
            self.rest(now)
            return True
        if not slow:
            self._open_until, self._next_rest = None, self._rest
        return False

    def rest(self, now: float) -> None:
        """Opens, or stays open for longer: the store is of no use now."""
        self._open_until = now + self._next_rest
        self._next_rest = min(2 * self._next_rest, LONGEST_REST * self._rest)
        self._num_slow = 0

    def answered(self) -> None:
        """Closes: the store answers. Only a call shows that it does its work too: until one has,
        the next rest is as long as it would be."""
        self._open_until = None

    @property
    def is_open(self) -> bool:
        return self._open_until is not None

    def seconds_left(self, now: float) -> float:
        """Return how long the store is still to be left alone."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - now)


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
        self._failed: dict[Store, asyncio.Event] = {}
        self._closed: set[Store] = set()

    def is_up(self, store: Store) -> bool:
        """Return whether a store is asked now; for any thread."""
        breaker = self._breakers.get(store)
        return store not in self._closed and (breaker is None or not breaker.is_open)

    async def tend(
        self,
        store: Store,
        opened: Callable[[Collection[EntryId]], None],
        tried: Future[None],
    ) -> None:
        """Opens a store, as often as it takes, and again whenever a call of it has failed; before
        that it is not asked. What is wrong is counted and logged once. Ends when it is cancelled.

        Args:
            opened: told of what the store holds, each time.
            tried: is done when it has been tried once.
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
                    what = f"{where} cannot be used ({problem})"
                    then = "the server works without it and tries again"
                    _log.warning("%s: %s", what, then, exc_info=unknown(error))
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

    async def ask(
        self,
        store: Store,
        call: Callable[[_A], Awaitable[_T]],
        what: _A,
        *,
        since: float | None = None,
        limit: float | None = None,
    ) -> _T | None:
        """What a store answers; None if it fails, is too slow or has been lately, is not open yet,
        or if the time is over already.

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
        began, breaker = loop.time(), self._breaker(store)
        deadline = (began if since is None else since) + limit
        may_ask = began < deadline and store not in self._closed
        turn = breaker.admit(began) if may_ask else None
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
            text = f"the cache tier {store.name!r} failed ({line_of(error)})"
            _log.warning("%s; it is left alone for a while", text, exc_info=unknown(error))
            return None
        finally:
            if breaker.ended(turn, loop.time(), failed=failed, slow=slow):
                self._counts[f"opened_{store.name}"] += 1
                if store in self._failed:
                    self._failed[store].set()

    def _breaker(self, store: Store) -> Breaker:
        assert self._rest_seconds is not None
        return self._breakers.setdefault(store, Breaker(self._rest_seconds))


def unknown(error: Exception) -> Exception | None:
    """Return the error if the log is to show where it comes from; broken connections and time-outs
    are known."""
    return None if isinstance(error, OSError) else error


def line_of(error: Exception) -> str:
    """What an error says, on one line of a bearable length: others may have written it."""
    if isinstance(error, TimeoutError) and not str(error):
        return "it does not answer"
    text = " ".join(str(error)[:MOST_LETTERS].split()).rstrip(".")
    return "".join(each if each.isprintable() else "?" for each in text) or type(error).__name__
