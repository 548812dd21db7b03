"""The tier in host memory: sealed entries, least recently used first out, bounded by bytes."""

from __future__ import annotations

from collections.abc import Iterator

from vlm_serve.cache.tiers.entry import EntryId, Sealed


class HostStore:
    """Not thread-safe; the stack guards it.

    Args:
        max_bytes: most bytes of headers and payloads together; 0 stores nothing.

    Attributes:
        num_bytes: bytes stored.
    """

    def __init__(self, max_bytes: int) -> None:
        assert max_bytes >= 0
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: dict[EntryId, Sealed] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry_id: EntryId) -> bool:
        return entry_id in self._entries

    def __iter__(self) -> Iterator[EntryId]:
        """Least recently used first."""
        return iter(self._entries)

    def put(self, entry_id: EntryId, sealed: Sealed) -> list[tuple[EntryId, Sealed]]:
        """Stores an entry; returns what had to go for it, which may be the entry itself."""
        self.discard(entry_id)
        if sealed.num_bytes > self.max_bytes:
            return [(entry_id, sealed)]
        self._entries[entry_id] = sealed
        self.num_bytes += sealed.num_bytes
        overflow = []
        while self.num_bytes > self.max_bytes:
            oldest = next(iter(self._entries))
            overflow.append((oldest, self._entries[oldest]))
            self.discard(oldest)
        return overflow

    def get(self, entry_id: EntryId) -> Sealed | None:
        """The entry, now the most recently used one."""
        sealed = self._entries.pop(entry_id, None)
        if sealed is not None:
            self._entries[entry_id] = sealed
        return sealed

    def discard(self, entry_id: EntryId) -> None:
        sealed = self._entries.pop(entry_id, None)
        if sealed is not None:
            self.num_bytes -= sealed.num_bytes

    def clear(self) -> None:
        self._entries.clear()
        self.num_bytes = 0
