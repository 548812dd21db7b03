"""The lower tiers as one: a list of stores, fastest first, and the thread that calls them.

`put` hands an entry over and returns; the thread adds header and checksum and stores it. Until then
the entry is served from the queue. Entries that do not fit into a store move on to the next one. A
last store may be shared with other servers: it is read last, and evicted entries do not move there
(see `sharing`). The engine's thread never calls a store. Its immediate questions are answered from
the stack's own index.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar

from vlm_serve.cache.tiers.entry import (
    OF_PROMPTS,
    BadEntryError,
    Content,
    Entry,
    EntryId,
    Origin,
    Sealed,
    here,
    seal,
    unseal,
)
from vlm_serve.cache.tiers.store import Store, in_batches
from vlm_serve.cache.tiers.store_calls import (
    OPEN_SECONDS,
    REST_SECONDS,
    StoreCaller,
    line_of,
    unknown,
)

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

BATCH_BYTES = 32 << 20
"""Approximate bytes of entries per call of a store."""
CLOSE_SECONDS = 5.0
"""Time limit for closing a store. A slower one loses nothing."""
QUEUE = "host"
"""Tier name of entries that wait to be stored."""


class TierStack:
    """All lower tiers. Coroutines run on the stack's own thread (`submit`); any thread may call the
    other methods. Failures are counted in `counts`, never raised.

    Counts, by name:
    - "put"; "dropped": the queue was full or no store had space;
    - "bad": damaged or foreign entries; "failed": read or written in vain;
    - by store, "hit_*"; "evicted_*": gone, or moved on to the next store;
    - by store, "failed_*" calls, "opened_*" breakers and "skipped_*" calls.

    Args:
        origin: of these entries.
        stores: the tiers, in the order in which they are read.
        shared: the one shared with other servers.
        queue_bytes: most bytes that wait to be stored; more are dropped.
        rest_seconds: pause after a store's failure.
        open_seconds: how long the start waits for stores; later they open in the background.

    Attributes:
        share: called with entries of media, which every server may need.
    """

    def __init__(
        self,
        origin: Origin,
        stores: Sequence[Store],
        shared: Store | None = None,
        *,
        queue_bytes: int = 256 << 20,
        rest_seconds: float = REST_SECONDS,
        open_seconds: float = OPEN_SECONDS,
    ) -> None:
        self.origin = origin
        self.stores = (*stores, *([shared] if shared is not None else ()))
        self.shared = shared
        self.share: Callable[[Entry], None] | None = None
        self.counts: Counter[str] = Counter()
        self.caller = StoreCaller(self.counts, rest_seconds)
        self._filing_into = tuple(stores)
        self._queue_bytes = queue_bytes
        self._queue: dict[EntryId, Entry] = {}
        self._queued = 0
        self._touched: dict[EntryId, None] = {}
        self._filed: set[EntryId] = set()
        self._scheduled = False
        self._epoch = 0
        self._clearing = 0
        self._closing = False
        self._changed = threading.Condition()
        self._writing = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="vlm-serve-tiers", daemon=True
        )
        self._start(open_seconds)

    def _start(self, seconds: float) -> None:
        """Start the thread, and opening the stores; wait a limited time until each has been tried
        once."""
        self._thread.start()
        tried: list[Future[None]] = [Future() for _ in self.stores]
        for store, first in zip(self.stores, tried, strict=True):
            self.submit(self.caller.tend(store, self._opened, first))
        wait(tried, seconds)

    def _opened(self, known: Collection[EntryId]) -> None:
        """Add the entries that a store holds to the index."""
        with self._changed:
            if not self._clearing:
                self._filed.update(known)

    # On any thread, without waiting for a store

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start work on the stack's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def holds(self, entry_id: EntryId) -> bool:
        """Return True if the index lists an entry: it was stored or found, and not missed since.
        For a shared store the index is incomplete."""
        with self._changed:
            return entry_id in self._queue or entry_id in self._filed

    def touch(self, entry_id: EntryId) -> None:
        """Record that an entry was in use until now."""
        with self._changed:
            self._touched[entry_id] = None
        self._schedule()

    def put(self, entry: Entry, wait_seconds: float = 0.0) -> None:
        """Take an entry over. Waits for space in the queue only if told to, for a limited time."""

        def has_room() -> bool:
            return self._queued + entry.num_bytes <= self._queue_bytes

        with self._changed:
            if not has_room() and wait_seconds > 0:
                self._changed.wait_for(has_room, wait_seconds)
            if self._closing or entry.id in self._queue or not has_room():
                self.counts["dropped"] += 1
                return
            self.counts["put"] += 1
            self._queue[entry.id] = entry
            self._queued += entry.num_bytes
        if not isinstance(entry.source, Content):
            self.submit(self._take_in(entry))
        self._schedule()
        if self.share is not None and entry.id.kind not in OF_PROMPTS:
            self.share(entry)

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until everything is stored; return False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout)

    def clear(self) -> Future[None]:
        """Forget everything at once; the future completes when every store has removed it."""
        with self._changed:
            self._queue.clear()
            self._queued = 0
            self._filed.clear()
            self._epoch += 1
            self._clearing += 1
        return self.submit(self._clear())

    @property
    def lasting(self) -> bool:
        """True if newly stored entries outlive the process."""
        return any(store.lasting and self.caller.is_up(store) for store in self._filing_into)

    @property
    def reaches_others(self) -> bool:
        """True if a later or another process could read new entries."""
        return any(store.lasting or not store.private for store in self.stores)

    @property
    def epoch(self) -> int:
        """Number of flushes; content read before the last one must not be used."""
        return self._epoch

    def may_hold(self, entry_id: EntryId) -> bool:
        """Return True if a look-up is worth it: the index is complete for stores that only this
        process writes."""
        return not all(store.private for store in self.stores) or self.holds(entry_id)

    def sink(self, may_go_on: Callable[[], bool] = lambda: True) -> None:
        """Move entries that would be lost to the lasting stores at shutdown, least recently used
        first, as long as time permits, and store new ones there. Blocks."""
        self.submit(self._sink(may_go_on)).result()

    def close(self, timeout: float | None = None) -> None:
        """Store the queue, within `timeout` seconds, and close the stores."""
        self.drain(timeout)
        with self._changed:
            self._closing = True
            self._queue.clear()
        self.submit(self._close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # On the stack's thread

    async def locate(
        self, ids: Collection[EntryId], since: float | None = None
    ) -> dict[EntryId, str]:
        """Return the tier of each of these entries, without missing ones. Stores' time limits
        start at `since` (the loop's time; None: now)."""
        epoch = self._epoch
        places = {entry_id: QUEUE for entry_id in ids if entry_id in self._queue}
        filed: set[EntryId] = set()
        for store in self.stores:
            rest = [entry_id for entry_id in ids if entry_id not in places]
            if rest:
                held = await self.caller.ask(store, store.contains, rest, since) or set()
                filed |= held if store is not self.shared else set()
                places |= dict.fromkeys(held, store.name)
        gone = {entry_id for entry_id in ids if entry_id not in places}
        with self._changed:
            if self._clearing or epoch != self._epoch:
                return {}
            self._filed -= gone
            self._filed |= filed
        return places

    async def get(
        self, ids: Collection[EntryId], since: float | None = None
    ) -> dict[EntryId, Entry]:
        """Read and verify the entries that exist. Bad ones are counted, and removed from private
        stores. `since`: as for `locate`."""
        if self._clearing:
            return {}
        queued = [self._queue.get(entry_id) for entry_id in ids]
        entries = {entry.id: entry for entry in queued if entry is not None}
        self.counts[f"hit_{QUEUE}"] += len(entries)
        for store in self.stores:
            rest = [entry_id for entry_id in ids if entry_id not in entries]
            sealed: dict[EntryId, Sealed] = {}
            if rest:
                sealed = await self.caller.ask(store, store.get, rest, since) or {}
            bad = []
            for entry_id, content in sealed.items():
                try:
                    entries[entry_id] = unseal(content, entry_id, self.origin)
                except BadEntryError:
                    bad.append(entry_id)
            self.counts[f"hit_{store.name}"] += len(sealed) - len(bad)
            if bad:
                await self._discard(store, bad)
        gone = {entry_id for entry_id in ids if entry_id not in entries}
        with self._changed:
            self._filed -= gone
        return entries

    async def _take_in(self, entry: Entry) -> None:
        """Read what a device copies as soon as it is there: its memory is needed again."""
        here(entry.source)

    async def discard_bad(self, ids: Collection[EntryId]) -> None:
        """Discard entries that are intact but do not have the expected content."""
        for store in self.stores:
            held = await self.caller.call(store, store.contains, ids)
            if held:
                await self._discard(store, held)

    async def replace(self, entry: Entry) -> None:
        """Replace an intact entry of wrong content."""
        await self.discard_bad([entry.id])
        self.put(entry)

    async def _discard(self, store: Store, ids: Collection[EntryId]) -> None:
        self.counts["bad"] += len(ids)
        with self._changed:
            self._filed.difference_update(ids)
        await self.caller.call(store, store.discard, ids)

    # Filing

    def _schedule(self) -> None:
        with self._changed:
            if self._scheduled or self._closing:
                return
            self._scheduled = True
        self.submit(self._file_queue())

    async def _file_queue(self) -> None:
        """Store the queue, BATCH_BYTES at a time, until it is empty."""
        while True:
            async with self._writing:
                with self._changed:
                    entries = {entry.id: entry for entry in self._queue.values()}
                    touched, self._touched = self._touched, {}
                    if not entries and not touched:
                        self._scheduled = False
                        return
                for store in self._filing_into if touched else ():
                    await self.caller.call(store, store.touch, touched)
                await self._file(next(_batches(entries), {}))

    async def _file(self, batch: Mapping[EntryId, Entry]) -> None:
        try:
            sealed = {entry_id: seal(entry, self.origin) for entry_id, entry in batch.items()}
            await self._write(sealed)
        except Exception:
            self.counts["failed"] += 1
            _log.exception("evicted entries could not be filed")
        with self._changed:
            for entry_id, entry in batch.items():
                if self._queue.get(entry_id) is entry:
                    del self._queue[entry_id]
                    self._queued -= entry.num_bytes
                else:
                    self._filed.discard(entry_id)  # flushed meanwhile
            self._changed.notify_all()

    async def _write(self, entries: Mapping[EntryId, Sealed]) -> None:
        """Write entries down the list of stores: each is given what those before it do not keep."""
        for store in self._filing_into:
            moving: dict[EntryId, Sealed] = {}
            for batch in _batches(entries):
                gone = await self.caller.call(store, store.put, batch)
                self.counts[f"evicted_{store.name}"] += len(gone or ())
                gone = gone if gone is not None else dict(batch)
                with self._changed:
                    self._filed.update(batch.keys() - gone.keys())
                    self._filed.difference_update(gone)
                moving |= {
                    entry_id: content for entry_id, content in gone.items() if content is not None
                }
            entries = moving
        if self._filing_into:
            self.counts["dropped"] += len(entries)

    async def _clear(self) -> None:
        try:
            async with self._writing:
                for store in self.stores:
                    try:
                        await store.clear()  # without a time limit
                    except Exception as error:
                        self.counts[f"failed_{store.name}"] += 1
                        problem = f"the cache tier {store.name!r} could not be cleared yet"
                        _log.warning("%s (%s)", problem, line_of(error), exc_info=unknown(error))
        finally:
            with self._changed:
                self._filed.clear()
                self._clearing -= 1

    async def _sink(self, may_go_on: Callable[[], bool]) -> None:
        async with self._writing:
            self._filing_into = tuple(store for store in self._filing_into if store.lasting)
            for store in self.stores if self._filing_into else ():
                for batch in _batches(await store.sink()) if not store.lasting else ():
                    with self._changed:
                        self._filed.difference_update(batch)
                    if may_go_on():
                        await self._write(batch)

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for store in self.stores:
            with suppress(Exception):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await store.close()


_Sized = TypeVar("_Sized", Entry, Sealed)


def _batches(entries: Mapping[EntryId, _Sized]) -> Iterator[dict[EntryId, _Sized]]:
    """Yield entries in batches of about BATCH_BYTES, in order."""
    return map(dict, in_batches(entries.items(), lambda entry: entry[1].num_bytes, BATCH_BYTES))
