"""Accounting of vision embeddings: which are kept, in which slot, and who uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    slot: int
    num_bytes: int
    pins: int
    filled: bool
    """False after `invalidate`: the slot is empty, and the next user computes it again."""


class EmbeddingCache:
    """Embeddings by key, evicted least recently used first, within a byte budget.

    It manages slots, not tensors: the owner of the tensors frees the slots that `take_evicted`
    returns. Pinned entries are never evicted, so running requests may exceed the budget for a
    while. The excess is evicted when it is unpinned.

    Args:
        capacity: bytes for pinned and unpinned entries together, as far as unpinned ones can be
            evicted.

    Attributes:
        used: bytes of all entries.
        hits, misses, evictions: counts of `acquire`'s results and of evicted entries.
        on_eviction: called with key and slot before an embedding is evicted for lack of space.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity >= 0
        self.capacity = capacity
        self.used = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.on_eviction: Callable[[bytes, int], None] = lambda key, slot: None
        self._entries: dict[bytes, _Entry] = {}
        self._idle: dict[bytes, None] = {}
        """Unpinned keys, least recently used first."""
        self._evicted: list[int] = []
        self._next_slot = 0

    def __contains__(self, key: bytes) -> bool:
        """Return True if the embedding exists or the current step is about to compute it."""
        entry = self._entries.get(key)
        return entry is not None and entry.filled

    def __len__(self) -> int:
        return len(self._entries)

    def acquire(self, key: bytes, num_bytes: int) -> tuple[int, bool]:
        """Pin an embedding. Return its slot and whether it exists; if not, the caller computes it.

        `key` covers everything that the embedding depends on (root key and content hash). Equal
        keys mean equal embeddings at every position of every prompt.
        """
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(self._next_slot, num_bytes, 0, filled=False)
            self._next_slot += 1
            self.used += num_bytes
        assert entry.num_bytes == num_bytes, "one key with two sizes"
        hit = entry.filled
        entry.filled = True
        entry.pins += 1
        self._idle.pop(key, None)
        self.hits += hit
        self.misses += not hit
        self._trim()
        return entry.slot, hit

    def release(self, key: bytes) -> None:
        """Remove one pin."""
        entry = self._entries.get(key)
        assert entry is not None and entry.pins > 0, "an embedding was released twice"
        entry.pins -= 1
        if entry.pins:
            return
        if entry.filled:
            self._idle[key] = None
            self._trim()
        else:
            self._drop(key)

    def invalidate(self, key: bytes) -> None:
        """Mark an embedding as missing because the step that should have computed it failed."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.filled = False
        if not entry.pins:
            del self._idle[key]
            self._drop(key)

    def take_evicted(self) -> tuple[int, ...]:
        """Return the slots freed since the last call. Slot numbers are never reused."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def flush(self, *, saved: bool = False) -> None:
        """Evict every unpinned embedding; with `saved`, as for lack of space."""
        while self._idle:
            if saved:
                self._tell_oldest()
            self._evict_oldest()

    def check(self) -> None:
        """Recompute the accounting; AssertionError names the fault."""
        entries = self._entries
        assert self.used == sum(entry.num_bytes for entry in entries.values()), "bytes are wrong"
        slots = [entry.slot for entry in entries.values()]
        assert len(slots) == len(set(slots)), "two embeddings share a slot"
        assert not set(slots) & set(self._evicted), "an evicted slot is still in use"
        idle = {key for key, entry in entries.items() if not entry.pins}
        assert idle == self._idle.keys(), "idle embeddings are wrong"
        assert all(entries[key].filled for key in idle), "an embedding that was never made is kept"
        pinned = sum(entry.num_bytes for entry in entries.values() if entry.pins)
        assert self.used <= max(self.capacity, pinned), "over budget with idle embeddings"

    def _trim(self) -> None:
        while self.used > self.capacity and self._idle:
            self._tell_oldest()
            self._evict_oldest()

    def _tell_oldest(self) -> None:
        oldest = next(iter(self._idle))
        self.on_eviction(oldest, self._entries[oldest].slot)

    def _evict_oldest(self) -> None:
        key = next(iter(self._idle))
        del self._idle[key]
        self._drop(key)
        self.evictions += 1

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self.used -= entry.num_bytes
        self._evicted.append(entry.slot)
