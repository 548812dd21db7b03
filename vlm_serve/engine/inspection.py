"""Looking into the cache, and holding on to a part of it, without running anything."""

from __future__ import annotations

import time
from collections.abc import Callable

from vlm_serve.cache.listing import TreePage
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.engine.media import MediaPlanner
from vlm_serve.engine.outputs import CacheReport
from vlm_serve.preprocess.prompt import Prompt


class Inspector:
    """What an engine says about its cache. Only the engine's thread calls it.

    Args:
        cache, media: the engine's books.
        clock: seconds; the cache itself knows no time.
    """

    def __init__(
        self,
        cache: PrefixCache,
        media: MediaPlanner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._cache = cache
        self._media = media

    def probe(self, prompt: Prompt) -> CacheReport:
        """The report that a request with this prompt would begin with now. Changes nothing."""
        match = self._cache.match(prompt.keys, limit=len(prompt) - 1)
        decoded, encoded = self._media.forecast(prompt, match.boundary)
        return CacheReport(
            prompt_tokens=len(prompt),
            kv_boundary=match.kv_boundary,
            state_boundary=match.state_boundary,
            boundary=match.boundary,
            tiers={"device": match.boundary} if match.boundary else {},
            media_decoded=decoded,
            media_encoded=encoded,
            media_skipped=len(prompt.media) - encoded,
            reason=match.reason,
        )

    def tree(self, offset: int, limit: int) -> TreePage:
        """A page of the trie, parents before children."""
        return self._cache.tree(offset=offset, limit=limit)

    def pin(self, prompt: Prompt, ttl_seconds: float) -> int:
        """Pins the deepest usable prefix; returns its tokens."""
        return self._cache.pin(prompt.keys, self.clock() + ttl_seconds)

    def expire(self) -> None:
        """Lets go of the pins whose time has come."""
        self._cache.expire(self.clock())
