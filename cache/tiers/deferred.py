"""A store whose creation may be deferred, because its resources are not available at start-up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping

from vlm_serve.cache.tiers.daemon_thread import in_daemon_thread
from vlm_serve.cache.tiers.entry import EntryId, Sealed
from vlm_serve.cache.tiers.store import TIME_LIMIT, Store


class DeferredStore:
    """See `Store`. Created by `open`; before that it can only be cleared and closed.

    Args:
        name, place: as the store's own.
        make: creates it, in a thread, at every attempt; raises OSError.
    """

    private = True
    lasting = True
    time_limit = TIME_LIMIT

    def __init__(self, name: str, place: str, make: Callable[[], Store]) -> None:
        self.name = name
        self.place = place
        self._make = make
        self._lock = threading.Lock()
        self._created: Store | None = None
        self._making: asyncio.Future[None] | None = None
        self._outdated = False
        self._over = False

    @property
    def counters(self) -> Mapping[str, int]:
        return {} if self._created is None else self._created.counters

    async def open(self) -> Collection[EntryId]:
        if self._created is None:
            if self._making is None:  # do not start a second attempt beside one that hangs
                self._making = asyncio.ensure_future(
                    in_daemon_thread(f"open-{self.name}", self._make_here)
                )
                self._making.add_done_callback(self._has_ended)
            await asyncio.shield(self._making)
        assert self._created is not None
        known = await self._created.open()
        if self._outdated:
            await self._created.clear()
            self._outdated, known = False, ()
        return known

    def _make_here(self) -> None:
        """Create the store; it may be unwanted by the time this ends."""
        store = self._make()
        with self._lock:
            self._created = None if self._over else store
        if self._over:
            asyncio.run(store.close())

    def _has_ended(self, making: asyncio.Future[None]) -> None:
        self._making = None
        if not making.cancelled():
            making.exception()  # the waiting task may be gone

    async def contains(self, ids: Collection[EntryId]) -> set[EntryId]:
        return await self._store.contains(ids)

    async def get(self, ids: Collection[EntryId]) -> dict[EntryId, Sealed]:
        return await self._store.get(ids)

    async def put(self, entries: Mapping[EntryId, Sealed]) -> dict[EntryId, Sealed | None]:
        return await self._store.put(entries)

    async def touch(self, ids: Collection[EntryId]) -> None:
        await self._store.touch(ids)

    async def discard(self, ids: Collection[EntryId]) -> None:
        await self._store.discard(ids)

    async def sink(self) -> dict[EntryId, Sealed]:
        return {}

    async def clear(self) -> None:
        """Forget existing files at its place as well: if they cannot be removed now, they are
        removed before the store is used again."""
        if self._created is None:
            self._outdated = True
            return
        try:
            await self._created.clear()
        except BaseException:
            self._outdated = True
            raise

    async def close(self) -> None:
        with self._lock:
            self._over = True
        if self._created is not None:
            await self._created.close()

    @property
    def _store(self) -> Store:
        assert self._created is not None, "it is not open"
        if self._outdated:
            raise OSError("what has been flushed is still there")
        return self._created
