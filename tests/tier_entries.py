"""Entries of lower cache tiers for tests, and questions to a stack of tiers."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from vlm_serve.cache.tiers.entry import Entry, EntryId, Kind, Origin, Sealed, seal
from vlm_serve.cache.tiers.stack import TierStack
from vlm_serve.cache.tiers.store import Store
from vlm_serve.cache.tiers.store_calls import StoreCaller

ORIGIN = Origin(bytes(range(32)))
_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_A = TypeVar("_A")


class UntimedCaller(StoreCaller):
    """Calls stores without limits, and without a pause after failures: there is no clock."""

    async def call(
        self,
        store: Store,
        call: Callable[[_A], Awaitable[_T]],
        argument: _A,
        *,
        since: float | None = None,
        limit: float | None = None,
    ) -> _T | None:
        try:
            return await call(argument)
        except Exception:
            self._counts[f"failed_{store.name}"] += 1
            _log.exception("the cache tier %r failed", store.name)
            return None


class StackInCaller(TierStack):
    """Tiers without a thread: everything happens in the caller, and has when a call returns."""

    def _start(self, seconds: float) -> None:
        self.caller = UntimedCaller(self.counts, 0.0)
        self._thread = threading.Thread(target=bool)
        self._thread.start()
        for store in self.stores:
            self._opened(self._loop.run_until_complete(store.open()))

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        future: Future[_T] = Future()
        try:
            future.set_result(self._loop.run_until_complete(work))
        except Exception as error:
            future.set_exception(error)
        return future


def entry(number: int, size: int = 1000, kind: Kind = Kind.KV) -> Entry:
    payload = random.Random(number).randbytes(size)
    return Entry(EntryId(kind, number.to_bytes(32, "big")), 16, True, "float32[4,2]", payload)


def locate(tiers: TierStack, *numbers: int) -> list[str | None]:
    """Where entries are."""
    ids = [entry(number).id for number in numbers]
    places = tiers.submit(tiers.locate(ids)).result()
    return [places.get(entry_id) for entry_id in ids]


def get(tiers: TierStack, number: int) -> Entry | None:
    entry_id = entry(number).id
    found = tiers.submit(tiers.get([entry_id])).result()
    assert found.keys() <= {entry_id}
    return found.get(entry_id)


def sealed(*numbers: int, size: int = 1000) -> dict[EntryId, Sealed]:
    return {entry(n).id: seal(entry(n, size), ORIGIN) for n in numbers}
