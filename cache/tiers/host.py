"""The tier in host memory: sealed entries, bounded by bytes, evicted least recently used first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from vlm_serve.cache.tiers.entry import EntryId, Sealed
from vlm_serve.cache.tiers.store import TIME_LIMIT


class HostStore:
    """See `Store`.

    Args:
        max_bytes: most bytes of headers and payloads together; 0 stores nothing.

    Attributes:
        num_bytes: bytes stored.
    """

    name = "host"
    place = "memory of this process"
    private = True
    lasting = False
    time_limit = TIME_LIMIT

    def __init__(self, max_bytes: int) -> None:
        assert max_bytes >= 0
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: dict[EntryId, Sealed] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[EntryId]:
        """Iterate least recently used first."""
        return iter(self._entries)

    @property
    def counters(self) -> Mapping[str, int]:
        return {"bytes": self.num_bytes, "entries": len(self)}

    async def open(self) -> tuple[EntryId, ...]:
        return ()

    async def contains(self, ids: Collection[EntryId]) -> set[EntryId]:
        return {entry_id for entry_id in ids if entry_id in self._entries}

    async def get(self, ids: Collection[EntryId]) -> dict[EntryId, Sealed]:
        sealed = {
            entry_id: self._entries[entry_id] for entry_id in ids if entry_id in self._entries
        }
        await self.touch(sealed)
        return sealed

    async def put(self, entries: Mapping[EntryId, Sealed]) -> dict[EntryId, Sealed | None]:
        overflow: dict[EntryId, Sealed | None] = {}
        for entry_id, sealed in entries.items():
            self._remove(entry_id)
            if sealed.num_bytes > self.max_bytes:
                overflow[entry_id] = sealed
                continue
            self._entries[entry_id] = sealed
            self.num_bytes += sealed.num_bytes
            while self.num_bytes > self.max_bytes:
                oldest = next(iter(self._entries))
                overflow[oldest] = self._entries[oldest]
                self._remove(oldest)
        return overflow

    async def touch(self, ids: Collection[EntryId]) -> None:
        for entry_id in ids:
            if entry_id in self._entries:
                self._entries[entry_id] = self._entries.pop(entry_id)

    async def discard(self, ids: Collection[EntryId]) -> None:
        for entry_id in ids:
            self._remove(entry_id)

    async def sink(self) -> dict[EntryId, Sealed]:
        entries = self._entries
        await self.clear()
        return entries

    async def clear(self) -> None:
        self._entries = {}
        self.num_bytes = 0

    async def close(self) -> None:
        await self.clear()

    def _remove(self, entry_id: EntryId) -> None:
        sealed = self._entries.pop(entry_id, None)
        self.num_bytes -= sealed.num_bytes if sealed is not None else 0
