"""Why a match ends where it does (docs/architecture.md#reasons)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlm_serve.cache.records import NO_MEDIA, MediaStart, Node

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vlm_serve.cache.matching import Boundaries
    from vlm_serve.cache.trie import Trie
    from vlm_serve.preprocess.identity.keys import PromptKeys


class GhostMemory:
    """The last `limit` evicted keys, the oldest dropped first: it tells "evicted" from "never seen"
    and holds no data."""

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


@dataclass(frozen=True, slots=True)
class Evidence:
    """The cache's knowledge about missing content.

    Attributes:
        trie: the existing nodes.
        evicted_nodes, evicted_snapshots: keys of evicted objects, most recent ones only.
        pending: keys of the blocks that running requests publish next -> number of requests.
    """

    trie: Trie
    evicted_nodes: GhostMemory
    evicted_snapshots: GhostMemory
    pending: Mapping[bytes, int]


def media_offset(keys: PromptKeys, start: int, end: int) -> int:
    """Return the offset of the first media span that starts in `[start, end)`, or NO_MEDIA."""
    index = bisect_left(keys.span_bounds, (start, 0))
    if index == len(keys.span_bounds) or keys.span_bounds[index][0] >= end:
        return NO_MEDIA
    return keys.span_bounds[index][0] - start


def media_starts(keys: PromptKeys, start: int, end: int) -> tuple[MediaStart, ...]:
    """Return the media spans that start in `[start, end)`, relative to `start`."""
    first = bisect_left(keys.span_bounds, (start, 0))
    last = bisect_left(keys.span_bounds, (end, 0))
    return tuple(
        MediaStart(bounds[0] - start, bounds[1] - bounds[0], kind, content_hash)
        for bounds, kind, content_hash in zip(
            keys.span_bounds[first:last],
            keys.span_kinds[first:last],
            keys.span_hashes[first:last],
            strict=True,
        )
    )


def key_at(keys: PromptKeys, cut: int) -> bytes:
    """Return the key of the node that ends at a cut point."""
    depth, rest = divmod(cut, keys.block_size)
    return keys.tails[cut] if rest else keys.block_keys[depth - 1]


def miss_reason(
    evidence: Evidence, keys: PromptKeys, limit: int, path: list[Node], found: Boundaries
) -> str:
    """Return one word for a match that found these boundaries."""
    possible = keys.last_cut(len(keys) - 1)
    if possible == 0:
        return "below_granularity"
    if found.usable == possible:
        return "full"
    if found.usable < found.state:
        return "experts_missing"
    if found.state < found.kv:
        return _state_reason(evidence, keys, found)
    return _kv_reason(evidence, keys, limit, path, found)


def _state_reason(evidence: Evidence, keys: PromptKeys, found: Boundaries) -> str:
    """Return the reason for a match with KV beyond its state."""
    first = bisect_right(keys.cuts, found.state)
    last = bisect_right(keys.cuts, found.kv)
    evicted = evidence.evicted_snapshots
    if len(evicted) and any(key_at(keys, cut) in evicted for cut in keys.cuts[first:last]):
        return "snapshot_evicted"
    return "no_snapshot"


def _kv_reason(
    evidence: Evidence, keys: PromptKeys, limit: int, path: list[Node], found: Boundaries
) -> str:
    """Return the reason for a match whose KV ends where its state does."""
    block_size = keys.block_size
    start = len(path) * block_size
    end = min(start + block_size, len(keys))
    missing = [keys.tails[cut] for cut in _cuts_between(keys, start, end) if cut in keys.tails]
    if len(path) < len(keys.block_keys):
        missing.append(keys.block_keys[len(path)])
    if any(key in evidence.evicted_nodes for key in missing):
        return "kv_evicted"
    if any(key in evidence.pending for key in missing):
        return "in_flight"
    deepest = bisect_right(keys.cuts, min(limit, start))
    if deepest and keys.cuts[deepest - 1] > found.kv:
        return "span_clamp"
    parent = path[-1].key if path else keys.root
    if _in_a_video(keys, found.kv):
        return "media_grown"
    offset = media_offset(keys, start, end)
    differs = media_offset(keys, max(start, found.kv), end) != NO_MEDIA
    if differs and (parent, offset) in evidence.trie.media_starts:
        return "media_changed"
    if not path and evidence.trie.roots and keys.root not in evidence.trie.roots:
        return "salt"
    return "unseen" if found.usable else "cold"


def _in_a_video(keys: PromptKeys, boundary: int) -> bool:
    """Return True if the next token continues a video whose earlier part is fully cached."""
    index = bisect_left(keys.span_bounds, (boundary, 0))
    if index == len(keys.span_bounds) or not keys.span_continues[index]:
        return False
    return index > 0 and keys.span_bounds[index - 1][1] <= boundary


def _cuts_between(keys: PromptKeys, start: int, end: int) -> list[int]:
    """Return the cut points in `(start, end]`."""
    return keys.cuts[bisect_right(keys.cuts, start) : bisect_right(keys.cuts, end)]
