"""Looking into the cache, and holding on to a part of it, without running anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.cache.records import Node
from vlm_serve.cache.tiers.lookup import Deeper, Segment
from vlm_serve.cache.tiers.up import TierFetcher
from vlm_serve.engine.media import MediaPlanner
from vlm_serve.engine.outputs import CacheReport
from vlm_serve.engine.reports import (
    boundary_key,
    prompt_media,
    prompt_segments,
    tokens_by_tier,
)
from vlm_serve.preprocess.prompt import Prompt

MAX_WAIT_SECONDS = 3600.0
"""Waiting for a queue takes no times beyond some millions of seconds."""


class Inspector:
    """What an engine says about its cache. Only the engine's thread calls it.

    Args:
        cache, media: the engine's books.
        fetcher: knows what lower cache tiers hold; None: there are none.
        clock: seconds; the cache itself knows no time.
    """

    def __init__(
        self,
        cache: PrefixCache,
        media: MediaPlanner,
        fetcher: TierFetcher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._cache = cache
        self._media = media
        self._fetcher = fetcher

    def look_up(self, prompt: Prompt) -> Future[Deeper | None] | None:
        """What the tiers could add, for `probe`. Another thread is to wait for it."""
        if self._fetcher is None:
            return None
        limit = len(prompt) - 1
        match = self._cache.match(prompt.keys, limit=limit)
        return self._fetcher.look_up(prompt.keys, match, limit)

    def look_up_embeddings(
        self, prompt: Prompt, deeper: Deeper | None
    ) -> Future[dict[bytes, str]] | None:
        """Which embeddings the tiers have that the prompt would need then; see `look_up`."""
        boundary = self._cache.match(prompt.keys, limit=len(prompt) - 1).boundary
        boundary = max(boundary, deeper.boundary if deeper is not None else 0)
        return self._media.locate_below(prompt, boundary)

    def probe(
        self,
        prompt: Prompt,
        deeper: Deeper | None = None,
        embeddings: Mapping[bytes, str] | None = None,
    ) -> CacheReport:
        """The report that a request with this prompt would begin with now. Changes nothing."""
        limit = len(prompt) - 1
        match = self._cache.match(prompt.keys, limit=limit)
        boundary, reason = match.boundary, match.reason
        segments: tuple[Segment, ...] = ()
        if deeper is not None and deeper.boundary > boundary:
            boundary, segments = deeper.boundary, deeper.segments
            reason = "full" if boundary == prompt.keys.last_cut(limit) else reason
        parts = prompt_segments(boundary, len(prompt), segments)
        decoded, spans, recalled = self._media.forecast(prompt, boundary, embeddings or {})
        encoded = len({span.item for span in spans})
        return CacheReport(
            prompt_tokens=len(prompt),
            kv_boundary=max(match.kv_boundary, boundary),
            state_boundary=max(match.state_boundary, boundary),
            boundary=boundary,
            tiers=tokens_by_tier(parts),
            media_decoded=decoded,
            media_encoded=encoded,
            media_skipped=len(prompt.media) - encoded,
            reason=reason,
            segments=parts,
            media=prompt_media(prompt, boundary, {span.start for span in spans}, recalled),
            snapshots=self._cache.snapshot_positions(prompt.keys, len(prompt)),
            boundary_key=boundary_key(prompt.keys, boundary),
        )

    def pin(self, prompt: Prompt, ttl_seconds: float) -> int:
        """Pins the deepest usable prefix; returns its tokens."""
        return self._cache.pin(prompt.keys, self.clock() + ttl_seconds)

    def pin_node(self, node: Node, ttl_seconds: float) -> int:
        """Pins a node and all before it; returns the tokens."""
        return self._cache.pin_node(node, self.clock() + ttl_seconds)

    def expire(self) -> None:
        """Lets go of the pins whose time has come."""
        self._cache.expire(self.clock())

    @property
    def seconds_left(self) -> float | None:
        """Until the next pin's time comes; None: nothing is pinned."""
        end = self._cache.next_expiry
        return None if end is None else max(0.0, min(end - self.clock(), MAX_WAIT_SECONDS))
