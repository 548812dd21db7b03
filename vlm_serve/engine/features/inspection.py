"""Inspects and pins parts of the cache without running anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.cache.records import Node
from vlm_serve.cache.tier_fetching import TierFetcher
from vlm_serve.cache.tiers.lookup import Deeper, Segment
from vlm_serve.engine.core.hooks import Hooks
from vlm_serve.engine.core.media import MediaPlanner
from vlm_serve.engine.requests.outputs import CacheReport, Delta, KeptMark
from vlm_serve.engine.requests.reports import (
    boundary_key,
    prompt_media,
    prompt_segments,
    repeated_spans,
    tokens_by_tier,
)
from vlm_serve.engine.requests.sequence import Sequence
from vlm_serve.preprocess.identity.keys import PromptKeys
from vlm_serve.preprocess.identity.prompt import Prompt

MAX_WAIT_SECONDS = 3600.0
"""Upper bound for a wait: queues reject timeouts of some millions of seconds."""


@dataclass(frozen=True, slots=True)
class PinInfo:
    """A pin as clients see it.

    Attributes:
        key: hexadecimal key of its deepest node.
        tokens: of the pinned prefix.
        blocks: KV blocks that it holds, some perhaps together with other pins.
        state: it holds a snapshot, too.
    """

    key: str
    tokens: int
    blocks: int
    state: bool
    expires_in_seconds: float


class Inspector:
    """Answers questions about an engine's cache and manages pins. Used by the engine's thread only.

    Args:
        cache, media: the engine's cache and media planner.
        hooks: have pins expire between steps, while there are some.
        fetcher: index of the lower cache tiers; None if there are no tiers.
        clock: time in seconds; the cache itself has no clock.
    """

    def __init__(
        self,
        cache: PrefixCache,
        media: MediaPlanner,
        hooks: Hooks,
        fetcher: TierFetcher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._cache = cache
        self._media = media
        self._hooks = hooks
        self._fetcher = fetcher

    def look_up(self, prompt: Prompt) -> Future[Deeper | None] | None:
        """Start a lookup of what the tiers could add, for `probe`. Another thread must wait for the
        result."""
        if self._fetcher is None:
            return None
        limit = len(prompt) - 1
        keys = self._keys(prompt)
        match = self._cache.match(keys, limit=limit)
        return self._fetcher.look_up(keys, match, limit)

    def look_up_embeddings(
        self, prompt: Prompt, deeper: Deeper | None
    ) -> Future[dict[bytes, str]] | None:
        """Start a lookup of the embeddings that the prompt would then need; see `look_up`."""
        boundary = self._cache.match(self._keys(prompt), limit=len(prompt) - 1).boundary
        boundary = max(boundary, deeper.boundary if deeper is not None else 0)
        return self._media.locate_below(prompt, boundary)

    def probe(
        self,
        prompt: Prompt,
        deeper: Deeper | None = None,
        embeddings: Mapping[bytes, str] | None = None,
    ) -> CacheReport:
        """Return the initial report of a request with this prompt. Change nothing."""
        limit, keys = len(prompt) - 1, self._keys(prompt)
        match = self._cache.match(keys, limit=limit)
        boundary, reason = match.boundary, match.reason
        segments: tuple[Segment, ...] = ()
        if deeper is not None and deeper.boundary > boundary:
            boundary, segments = deeper.boundary, deeper.segments
            reason = "full" if boundary == keys.last_cut(limit) else reason
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
            media_cut_short=sum(item.cut_short for item in prompt.media),
            media_repeated=repeated_spans(prompt),
            reason=reason,
            answer_tokens=match.answered,
            segments=parts,
            media=prompt_media(prompt, boundary, {span.start for span in spans}, recalled),
            snapshots=self._cache.snapshot_positions(keys, len(prompt)),
            boundary_key=boundary_key(keys, boundary),
        )

    def _keys(self, prompt: Prompt) -> PromptKeys:
        """Return a prompt's keys as a request with it would have them: with earlier ones' marks."""
        keys = prompt.keys.fork()
        self._cache.bring_marks(keys)
        return keys

    def on_renewed(self) -> None:
        """Release all pins: requests do not find what they hold."""
        self._cache.timed_pins.clear()

    def pin(self, prompt: Prompt, ttl_seconds: float, owner: bytes | None) -> int:
        """Pin the deepest usable prefix; return its number of tokens."""
        tokens = self._cache.pin(self._keys(prompt), self.clock() + ttl_seconds, owner)
        self._watch()
        return tokens

    def report_first(self, sequence: Sequence, delta: Delta) -> Delta:
        """Keep the prompt of a request up to its marks, and report how much of it could be kept."""
        group, prompt = sequence.group, sequence.prompt
        if group.report is None or group.report.marks:
            return delta
        kept = []
        for mark in reversed(prompt.marks):
            until = self.clock() + mark.seconds
            tokens = self._cache.pin(sequence.keys, until, prompt.owner, limit=mark.position)
            kept.append(KeptMark(mark.position, tokens, mark.seconds))
        self._watch()
        group.report = replace(group.report, marks=tuple(reversed(kept)))
        return replace(delta, cache_report=group.report)

    def pin_node(self, node: Node, ttl_seconds: float, owner: bytes | None) -> int:
        """Pin a node and its ancestors; return the number of tokens."""
        tokens = self._cache.timed_pins.add_node(node, self.clock() + ttl_seconds, owner)
        self._watch()
        return tokens

    def pins(self, owner: bytes | None) -> tuple[PinInfo, ...]:
        """Describe an owner's pins, None: all of them, earliest expiry first."""
        now = self.clock()
        pins = [pin for pin in self._cache.timed_pins.pins if owner in (None, pin.owner)]
        return tuple(
            PinInfo(
                key=pin.key.hex(),
                tokens=pin.nodes[-1].end,
                blocks=len({node.block.id for node in pin.nodes}),
                state=pin.snapshot is not None,
                expires_in_seconds=max(0.0, pin.until - now),
            )
            for pin in sorted(pins, key=lambda pin: pin.until)
        )

    def lift_pins(self, owner: bytes | None, key: bytes | None) -> int:
        """Release pins of an owner, None: of all, with that key, None: any; return their number."""
        return self._cache.timed_pins.lift(
            lambda pin: owner in (None, pin.owner) and key in (None, pin.key)
        )

    def expire(self) -> None:
        """Release expired pins, and look no more once there are none."""
        self._cache.timed_pins.expire(self.clock())
        if self._cache.timed_pins.next_end is None:
            self._hooks.on_time.remove(self.expire)
            self._hooks.seconds_left.remove(self._seconds_left)

    def _watch(self) -> None:
        """Have pins expire if there are some and nobody looks after them."""
        if self._cache.timed_pins.next_end is not None and self.expire not in self._hooks.on_time:
            self._hooks.on_time.append(self.expire)
            self._hooks.seconds_left.append(self._seconds_left)

    def _seconds_left(self) -> float:
        """Return the seconds until the next pin expires."""
        end = self._cache.timed_pins.next_end
        left = MAX_WAIT_SECONDS if end is None else end - self.clock()
        return max(0.0, min(left, MAX_WAIT_SECONDS))
