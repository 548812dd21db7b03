"""The lower tiers as one: host memory, and the disk below it.

`put` hands an entry over and returns; a thread adds header and checksum and files it. Until then
the entry is served from the queue. What host memory has no room for moves on to the disk.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vlm_serve.cache.tiers.disk import DiskStore
from vlm_serve.cache.tiers.entry import (
    BadEntryError,
    Entry,
    EntryId,
    Origin,
    Sealed,
    seal,
    unseal,
)
from vlm_serve.cache.tiers.host import HostStore

if TYPE_CHECKING:
    from collections.abc import Callable

TierName = Literal["host", "disk"]

BATCH_BYTES = 32 << 20
"""Entries that go to the disk in one transaction, about."""


@dataclass(frozen=True, slots=True)
class Found:
    """An intact entry and the tier it came from."""

    entry: Entry
    tier: TierName


class TierStack:
    """All methods may be called from any thread. Failures are counted in `counts`, never raised.

    Counts: "put", "dropped" (the queue was full or nothing had room), "hit_host", "hit_disk",
    "bad" (damaged or foreign entries), "failed" (read or written in vain), "evicted_host".

    Args:
        origin: whose entries these are.
        host_bytes: bound of the host tier, 0: none.
        disk: the tier below, if there is one.
        queue_bytes: most payload bytes that wait to be filed; more are dropped.
        background: False: entries are filed by the caller of `put` (simulations).
    """

    def __init__(
        self,
        origin: Origin,
        *,
        host_bytes: int,
        disk: DiskStore | None = None,
        queue_bytes: int = 256 << 20,
        background: bool = True,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.host = HostStore(host_bytes)
        self.disk = disk
        self._origin = origin
        self._queue_bytes = queue_bytes
        self._queue: dict[EntryId, Entry] = {}
        self._queued = 0
        self._busy = False
        self._closing = False
        self._straight_to_disk = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._work, name="vlm-serve-tiers", daemon=True)
            self._thread.start()

    def locate(self, entry_id: EntryId) -> TierName | None:
        """Where an entry is, by the books alone."""
        with self._changed:
            if entry_id in self._queue or entry_id in self.host:
                return "host"
        return "disk" if self.disk is not None and entry_id in self.disk else None

    def touch(self, entry_id: EntryId) -> None:
        """Marks an entry as the most recently used one of its tier."""
        with self._changed:
            self.host.get(entry_id)
        if self.disk is not None:
            self.disk.touch(entry_id)

    def put(self, entry: Entry, wait_seconds: float = 0.0) -> None:
        """Takes an entry over. Waits for room in the queue only if told to, and not for longer."""

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
            self._changed.notify_all()
        if self._thread is None:
            self._file_queue()

    def get(self, entry_id: EntryId) -> Found | None:
        """The entry, read and verified. A bad one is removed and counted."""
        with self._changed:
            queued = self._queue.get(entry_id)
            sealed = self.host.get(entry_id)
        if queued is not None:
            self.counts["hit_host"] += 1
            return Found(queued, "host")
        tier: TierName = "host"
        if sealed is None and self.disk is not None:
            tier, sealed = "disk", self.disk.read(entry_id)
        if sealed is None:
            return None
        try:
            entry = unseal(sealed, entry_id, self._origin)
        except BadEntryError:
            self.discard_bad(entry_id)
            return None
        self.counts[f"hit_{tier}"] += 1
        return Found(entry, tier)

    def discard_bad(self, entry_id: EntryId) -> None:
        """Removes an entry that is not what it should be."""
        self.counts["bad"] += 1
        with self._changed:
            self.host.discard(entry_id)
        if self.disk is not None:
            self.disk.delete(entry_id)

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until everything handed over is filed; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout)

    def clear(self) -> None:
        """Forgets everything in every tier."""
        with self._changed:
            self._queue.clear()
            self._queued = 0
            self._changed.wait_for(lambda: not self._busy)
            self.host.clear()
        if self.disk is not None:
            self.disk.clear()

    def sink(self, may_go_on: Callable[[], bool] = lambda: True) -> None:
        """Shutdown: moves the host tier to the disk, most recently used entries last, for as long
        as it may, and files there from now on."""
        if self.disk is None:
            return
        with self._changed:
            self._straight_to_disk = True
            sealed = [(entry_id, self.host.get(entry_id)) for entry_id in list(self.host)]
            self.host.clear()
        rest = [(entry_id, each) for entry_id, each in sealed if each is not None]
        while rest and may_go_on():
            batch, rest = _first(rest)
            self._write(batch)

    def close(self, timeout: float | None = None) -> None:
        """Files what is queued, for at most `timeout` seconds, and closes the disk's file."""
        self.drain(timeout)
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self.disk is not None:
            self.disk.close()

    # Filing

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
            self._file_queue()

    def _file_queue(self) -> None:
        """Files up to BATCH_BYTES of the queue."""
        with self._changed:
            batch: list[Entry] = []
            size = 0
            for entry in self._queue.values():
                batch.append(entry)
                size += entry.num_bytes
                if size >= BATCH_BYTES:
                    break
            self._busy = True
        try:
            self._file(batch)
        finally:
            with self._changed:
                self._busy = False
                for entry in batch:
                    if self._queue.get(entry.id) is entry:
                        del self._queue[entry.id]
                        self._queued -= entry.num_bytes
                self._changed.notify_all()

    def _file(self, batch: list[Entry]) -> None:
        sealed = [(entry.id, seal(entry, self._origin)) for entry in batch]
        overflow: list[tuple[EntryId, Sealed]] = []
        with self._changed:
            for entry_id, each in sealed:
                if entry_id not in self._queue:
                    continue  # forgotten meanwhile
                if self._straight_to_disk:
                    overflow.append((entry_id, each))
                else:
                    overflow += self.host.put(entry_id, each)
            self.counts["evicted_host"] += len(overflow) if self.host.max_bytes else 0
        self._write(overflow)

    def _write(self, overflow: list[tuple[EntryId, Sealed]]) -> None:
        while overflow:
            batch, overflow = _first(overflow)
            new = [each for each in batch if self.disk is not None and each[0] not in self.disk]
            stored = self.disk.write(new) if self.disk is not None and new else 0
            self.counts["dropped"] += len(new) - stored if self.disk is not None else len(batch)


def _first(
    entries: list[tuple[EntryId, Sealed]],
) -> tuple[list[tuple[EntryId, Sealed]], list[tuple[EntryId, Sealed]]]:
    """Entries of about BATCH_BYTES, and the rest."""
    size = 0
    for index, (_, sealed) in enumerate(entries):
        size += sealed.num_bytes
        if size >= BATCH_BYTES:
            return entries[: index + 1], entries[index + 1 :]
    return entries, []
