"""A router's knowledge of cached prefixes: digests from replicas, and its own requests since.

Both are bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

MAX_DIGEST_ENTRIES = 4096
"""Per replica."""
MAX_ALL_ENTRIES = 131_072
"""Over all replicas: the more replicas, the fewer entries of each are kept."""
MAX_SENT_KEYS = 32_768
"""Keys of requests that this router has sent."""
MAX_SENT_REPLICAS = 16
"""Per key, the latest ones."""


class Digests:
    """Index of the prefixes in the replicas' digests."""

    def __init__(self, limit: int = MAX_ALL_ENTRIES) -> None:
        self._limit = limit
        self._of: dict[str, dict[bytes, int]] = {}
        self._holders: dict[bytes, dict[str, int]] = {}

    def __len__(self) -> int:
        """Return the number of entries over all replicas."""
        return sum(map(len, self._of.values()))

    def holders(self, key: bytes) -> Mapping[str, int]:
        """Return replica -> tokens held of a key's prefix."""
        return self._holders.get(key, {})

    def replace(self, replica: str, entries: Iterable[tuple[bytes, int]]) -> None:
        """Replace a replica's digest."""
        most = self._share(len(self._of.keys() | {replica}))
        new: dict[bytes, int] = {}
        for key, tokens in entries:
            if len(new) >= most:
                break
            if isinstance(key, bytes) and isinstance(tokens, int) and tokens > 0:
                new[key] = tokens
        self._set(replica, new)
        for other, held in self._of.items():
            if len(held) > most:
                self._set(other, dict(list(held.items())[:most]))

    def remove(self, replica: str) -> None:
        """Forget a replica."""
        self._set(replica, {})
        self._of.pop(replica, None)

    def _share(self, replicas: int) -> int:
        return min(MAX_DIGEST_ENTRIES, max(1, self._limit // replicas))

    def _set(self, replica: str, new: dict[bytes, int]) -> None:
        old = self._of.get(replica, {})
        for key in old.keys() - new.keys():
            holders = self._holders[key]
            del holders[replica]
            if not holders:
                del self._holders[key]
        for key, tokens in new.items() - old.items():
            self._holders.setdefault(key, {})[replica] = tokens
        self._of[replica] = new


class SentPrefixes:
    """Recent destinations of each prefix; an LRU by key. A request that is open may still be
    computing its prefix, however long that takes, so it counts until it ends."""

    def __init__(self, limit: int = MAX_SENT_KEYS) -> None:
        self._limit = limit
        self._times: OrderedDict[bytes, dict[str, float]] = OrderedDict()
        self._open: dict[bytes, dict[str, int]] = {}

    def __len__(self) -> int:
        return len(self._times)

    def add(self, replica: str, keys: Sequence[bytes], now: float) -> None:
        """Record a request with these keys for a replica."""
        for key in keys:
            times = self._times.setdefault(key, {})
            times.pop(replica, None)
            times[replica] = now
            opened = self._open.setdefault(key, {})
            opened[replica] = opened.get(replica, 0) + 1
            if len(times) > MAX_SENT_REPLICAS:
                oldest = next(iter(times))
                del times[oldest]
                opened.pop(oldest, None)
            self._times.move_to_end(key)
        while len(self._times) > self._limit:
            key, _ = self._times.popitem(last=False)
            self._open.pop(key, None)

    def end(self, replica: str, keys: Sequence[bytes], now: float, *, computed: bool) -> None:
        """Record the end of such a request.

        Args:
            computed: its prompt was computed, so its prefix is cached since just now.
        """
        for key in keys:
            opened = self._open.get(key, {})
            if replica not in opened:
                continue
            opened[replica] -= 1
            if not opened[replica]:
                del opened[replica]
            if not opened:
                del self._open[key]
            if computed:
                self._times[key][replica] = now

    def recent(self, key: bytes, since: float) -> set[str]:
        """Return the replicas with a request with this key, or got one since some time."""
        opened = self._open.get(key, {})
        times = self._times.get(key, {})
        return {replica for replica, time in times.items() if time >= since or replica in opened}

    def remove(self, replica: str) -> None:
        """Forget a replica."""
        for key in [key for key, times in self._times.items() if replica in times]:
            del self._times[key][replica]
            if not self._times[key]:
                del self._times[key]
        for key in [key for key, opened in self._open.items() if replica in opened]:
            del self._open[key][replica]
            if not self._open[key]:
                del self._open[key]
