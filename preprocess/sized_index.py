"""Values within a limit of memory, the least recently used of which goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class SizedIndex(Generic[Value]):
    """Values by key, evicted in LRU order. Thread-safe.

    Args:
        max_bytes: limit on the memory of all entries; 0 stores nothing.
        cost: returns the bytes that a value counts for.

    Attributes:
        num_bytes: memory of all entries.
    """

    def __init__(self, max_bytes: int, cost: Callable[[Value], int]) -> None:
        assert max_bytes >= 0
        self._max_bytes, self._cost = max_bytes, cost
        self._entries: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = threading.RLock()  # a change of a value reads and puts under it
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def remove(self, key: Hashable) -> None:
        """Forget a value, if known."""
        with self._lock:
            self._remove(key)

    def clear(self) -> None:
        """Forget all values."""
        with self._lock:
            self._entries.clear()
            self.num_bytes = 0

    def get(self, key: Hashable) -> Value | None:
        """Return a value, if known, and mark it as most recently used."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: Hashable, value: Value) -> None:
        """Store a value, unless it is larger than the whole index."""
        cost = self._cost(value)
        with self._lock:
            self._remove(key)
            if cost > self._max_bytes:
                return
            while self.num_bytes + cost > self._max_bytes:
                self._remove(next(iter(self._entries)))
            self._entries[key] = value, cost
            self.num_bytes += cost

    def _remove(self, key: Hashable) -> None:
        _, cost = self._entries.pop(key, (None, 0))
        self.num_bytes -= cost
