"""A bounded memory of evicted keys: it tells "evicted" from "never seen" and holds no data."""

from __future__ import annotations


class GhostMemory:
    """The last `limit` keys added; the oldest is dropped first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._keys: dict[bytes, None] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: bytes) -> None:
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > self.limit:
            del self._keys[next(iter(self._keys))]

    def discard(self, key: bytes) -> None:
        """Remove a key that is back in the cache."""
        self._keys.pop(key, None)

    def clear(self) -> None:
        self._keys.clear()
