"""Media planner: decides which media spans a step must encode and how long their embeddings stay.

A repeated upload is recognised without decoding it. If its KV or embeddings have been evicted, its
request waits until it is decoded, off the engine's thread; all other requests continue. Decoding
stops when the request ends.

docs/architecture.md#scheduling
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from vlm_serve.cache.embeddings import EmbeddingCache
from vlm_serve.engine.core.media_tiers import EmbeddingTiers
from vlm_serve.engine.requests.plan import Encode, Recalled
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup
from vlm_serve.errors import VlmServeError
from vlm_serve.preprocess.identity.keys import embedding_key
from vlm_serve.preprocess.identity.prompt import MediaItem, MediaSpan, Prompt, UnconfirmedError
from vlm_serve.system.stopping import Stop

_log = logging.getLogger(__name__)

SpanRows = tuple[int, int, int, int]
_THREADS = 4


class MediaPlanner:
    """Manages vision embeddings for the scheduler.

    A sequence pins an embedding from the first slice that covers a part of its span until the last
    one has run. Concurrent requests for one medium share one encoding.

    Args:
        cache: embeddings by key, with pins and a byte budget.
        bytes_per_token: bytes of one placeholder token's embedding.
        tiers: lower cache tiers for embeddings; None if there are no tiers.
        coded: whether the executor takes pixels as they are, with a table of values.

    Attributes:
        counts: number of embeddings by source: "device", a tier's name, or "encoded".
        loading: media that must be decoded before their request can continue, with that request.
            The engine decodes them on another thread and removes them afterwards.
        needed: of these media, the spans without pixels and embeddings.
    """

    def __init__(
        self,
        cache: EmbeddingCache,
        bytes_per_token: int,
        tiers: EmbeddingTiers | None = None,
        *,
        coded: bool = False,
    ) -> None:
        self.cache = cache
        self._coded = coded
        self.tiers = tiers
        self.counts: Counter[str] = Counter()
        if tiers is not None:
            cache.on_eviction = tiers.save
        self.loading: dict[MediaItem, SequenceGroup] = {}
        self.needed: dict[MediaItem, frozenset[int]] = {}
        self._bytes_per_token = bytes_per_token
        self._pins: dict[int, dict[bytes, int]] = {}
        self._encodes: list[Encode] = []
        self._recalled: list[Recalled] = []
        self._new_keys: list[bytes] = []
        self._to_save: list[tuple[bytes, int]] = []
        self._budget = 0

    @property
    def num_encoded_spans(self) -> int:
        return self.counts["encoded"]

    @property
    def held_bytes(self) -> int:
        """Bytes of all embeddings, including fetched ones that wait for their step."""
        return self.cache.used + (self.tiers.num_bytes if self.tiers is not None else 0)

    def begin_step(self, budget: int) -> None:
        """Start a step that may encode spans of `budget` placeholder tokens."""
        self._budget = budget
        assert not self._encodes and not self._recalled

    def clip(self, sequence: Sequence, start: int, end: int) -> int:
        """Return the largest end, at most `end`, up to which this step can provide embeddings.

        A span is encoded as a whole. The first span of a step is always allowed, whatever its size.
        """
        spent = 0
        for span in spans_between(sequence.prompt, start, end):
            if self._key(sequence, span) in self.cache:
                continue
            recalled = self._poll_tiers(sequence, span)
            if recalled:
                continue
            item = sequence.prompt.media[span.item]
            spent += span.end - span.start
            first = not self._encodes and spent == span.end - span.start
            if recalled is None:
                pass  # the fetch is in flight: try again in the next step
            elif not item.has(span.patch):
                self._ask_for(sequence, span)
            elif spent <= self._budget or first:
                continue
            cuts = sequence.keys.cuts
            position = bisect_right(cuts, span.start) - 1
            return max(start, cuts[position]) if position >= 0 else start
        return end

    def _ask_for(self, sequence: Sequence, first: MediaSpan) -> None:
        """Request the pixels of a span and of later ones of its medium."""
        prompt = sequence.prompt
        item = prompt.media[first.item]
        if item in self.loading:
            return
        self.loading[item] = sequence.group
        self.needed[item] = frozenset(
            span.patch
            for span in spans_between(prompt, first.start, len(prompt))
            if span.item == first.item
            and not item.has(span.patch)
            and self._key(sequence, span) not in self.cache
        )

    def stall(self, sequence: Sequence, start: int | None = None) -> int:
        """Return the position at which a sequence has to wait for pixels to be decoded; its length
        if nowhere.

        Args:
            start: None for a running sequence, which waits only for media that are being decoded.
                For one that would start here: any medium that is not decoded makes it wait.
        """
        prompt = sequence.prompt
        first = sequence.num_computed if start is None else start
        for span in spans_between(prompt, first, len(prompt)):
            item = prompt.media[span.item]
            waits = start is not None or item in self.loading
            if waits and not item.has(span.patch) and self._key(sequence, span) not in self.cache:
                return span.start
        return sequence.num_tokens

    def acquire(self, sequence: Sequence, start: int, end: int) -> tuple[SpanRows, ...]:
        """Pin the embeddings that tokens `[start, end)` need; schedule the missing ones for
        encoding.

        Return (first token, last token + 1, slot, first row of the embedding) per span.
        """
        group = sequence.group
        rows = []
        pins = self._pins.setdefault(sequence.number, {})
        for span in spans_between(sequence.prompt, start, end):
            key = self._key(sequence, span)
            length = span.end - span.start
            slot, hit = self.cache.acquire(key, length * self._bytes_per_token)
            if hit and key not in pins:
                self.counts["device"] += 1
            elif not hit:
                self._new_keys.append(key)
                embedding = self.tiers.take(key) if self.tiers is not None else None
                if embedding is not None:
                    self._recalled.append(Recalled(embedding.rows, slot))
                    group.recalled_spans[span.start] = embedding.tier
                else:
                    self._encode(sequence, span, key, slot)
                self.counts[embedding.tier if embedding is not None else "encoded"] += 1
            pins[key] = pins.get(key, 0) + 1
            first, last = max(start, span.start), min(end, span.end)
            rows.append((first, last, slot, first - span.start))
        return tuple(rows)

    def _encode(self, sequence: Sequence, span: MediaSpan, key: bytes, slot: int) -> None:
        self._budget -= span.end - span.start
        item = sequence.prompt.media[span.item]
        coded = item.coded(span.patch) if self._coded else None
        pixels, table = coded or (item.patches(span.patch), None)
        adapter = sequence.adapter_slot
        self._encodes.append(Encode(pixels, span.grid, span.merge_size, slot, adapter, table))
        sequence.group.encoded_spans.add(span.start)
        if self.tiers is not None and self.tiers.ahead and not sequence.request.cold:
            self._to_save.append((key, slot))

    def _poll_tiers(self, sequence: Sequence, span: MediaSpan) -> bool | None:
        """Tell whether a missing embedding has arrived from a lower tier; None means it may still
        arrive. After a failed step, embeddings are recomputed instead."""
        if self.tiers is None or sequence.request.cold or sequence.suspect_until:
            return False
        prompt = sequence.prompt

        def following() -> list[tuple[bytes, int]]:
            wanted = {
                self._key(sequence, later): later.end - later.start
                for later in spans_between(prompt, span.start, len(prompt))
            }
            return [(name, size) for name, size in wanted.items() if name not in self.cache]

        key = self._key(sequence, span)
        return self.tiers.poll(sequence.number, key, following, sequence.patience)

    def take_encodes(self) -> tuple[Encode, ...]:
        encodes, self._encodes = tuple(self._encodes), []
        return encodes

    def take_recalled(self) -> tuple[Recalled, ...]:
        recalled, self._recalled = tuple(self._recalled), []
        return recalled

    def take_dropped(self) -> tuple[int, ...]:
        """Return the slots whose embeddings were evicted since the last call."""
        return self.cache.take_evicted()

    def commit_step(self) -> None:
        """Publish the embeddings that a successful step has encoded."""
        for key, slot in self._to_save:
            assert self.tiers is not None
            self.tiers.save(key, slot)
        self._new_keys, self._to_save = [], []

    def abandon_step(self) -> None:
        """Invalidate the embeddings that a failed step was to encode."""
        for key in self._new_keys:
            self.cache.invalidate(key)
        self._new_keys, self._to_save = [], []
        self._encodes, self._recalled = [], []

    def release_until(self, sequence: Sequence, position: int) -> None:
        """Unpin the embeddings of spans that end at or before `position`."""
        pins = self._pins.get(sequence.number)
        if not pins:
            return
        needed = {
            self._key(sequence, span)
            for span in sequence.prompt.spans
            if span.end > position and span.start < position
        }
        for key in [key for key in pins if key not in needed]:
            self._unpin(pins, key)

    def release_all(self, sequence: Sequence) -> None:
        pins = self._pins.pop(sequence.number, {})
        for key in list(pins):
            self._unpin(pins, key)
        if self.tiers is not None:
            self.tiers.release(sequence.number)

    def discard(self, sequence: Sequence) -> None:
        """Drop the embeddings of a finished cold sequence: no other sequence can use them."""
        for span in sequence.prompt.spans:
            self.cache.invalidate(self._key(sequence, span))

    def locate_below(self, prompt: Prompt, start: int) -> Future[dict[bytes, str]] | None:
        """Find the lower tiers of the embeddings that a prompt needs from `start` on and the device
        lacks, by key. Change nothing."""
        if self.tiers is None:
            return None
        keys = {
            _key(prompt.keys.vision_root, span)
            for span in spans_between(prompt, start, len(prompt))
        }
        return self.tiers.locate([key for key in keys if key not in self.cache])

    def forecast(
        self, prompt: Prompt, start: int, below: Mapping[bytes, str]
    ) -> tuple[int, list[MediaSpan], dict[int, str]]:
        """Predict the media work of a request that computes the prompt from token `start` on.

        Args:
            below: result of `locate_below`.

        Returns:
            Number of images and videos that were or would be decoded, the spans that would be
                encoded, and the tiers of all other missing embeddings by the spans' starts.
        """
        encoded: dict[bytes, MediaSpan] = {}
        recalled: dict[bytes, MediaSpan] = {}
        for span in spans_between(prompt, start, len(prompt)):
            key = _key(prompt.keys.vision_root, span)
            if key not in self.cache:
                (recalled if key in below else encoded).setdefault(key, span)
        decoded = {index for index, item in enumerate(prompt.media) if item.decoded}
        decoded |= {
            span.item for span in encoded.values() if not prompt.media[span.item].has(span.patch)
        }
        tiers = {span.start: below[key] for key, span in recalled.items()}
        return len(decoded), list(encoded.values()), tiers

    def _unpin(self, pins: dict[bytes, int], key: bytes) -> None:
        for _ in range(pins.pop(key)):
            self.cache.release(key)

    @staticmethod
    def _key(sequence: Sequence, span: MediaSpan) -> bytes:
        return _key(sequence.keys.vision_root, span)


def _key(root: bytes, span: MediaSpan) -> bytes:
    return embedding_key(root, span.pixels or span.content_hash, span.merge_size)


def spans_between(prompt: Prompt, start: int, end: int) -> Iterator[MediaSpan]:
    """Yield the media spans that overlap tokens `[start, end)`."""
    first = bisect_right(prompt.spans, start, key=lambda span: span.end)
    for span in prompt.spans[first:]:
        if span.start >= end:
            return
        yield span


class MediaLoading:
    """Decodes the media whose pixels the planner needs after all, off the engine's thread.

    Args:
        media: provides the media to load.
        post: runs a function on the engine's thread.
        fail: ends a request with an error; called on the engine's thread.
        restart: restarts a request with another prompt; called on the engine's thread.
    """

    def __init__(
        self,
        media: MediaPlanner,
        post: Callable[[Callable[[], None]], None],
        fail: Callable[[SequenceGroup, VlmServeError], None],
        restart: Callable[[SequenceGroup, Prompt], None],
    ) -> None:
        self._media = media
        self._post = post
        self._fail = fail
        self._restart = restart
        self._in_flight: dict[MediaItem, tuple[SequenceGroup, Stop]] = {}
        # The threads mostly wait for the decoder processes.
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="vlm-serve-reload")

    @property
    def busy(self) -> bool:
        return bool(self._in_flight)

    def start(self) -> None:
        """Load the media that were requested since the last call."""
        for item, group in self._media.loading.items():
            if item not in self._in_flight:
                stop = Stop()
                self._in_flight[item] = group, stop
                self._pool.submit(self._load, item, self._media.needed.pop(item), group, stop)

    def forget(self, group: SequenceGroup) -> None:
        """Cancel the loading of media for a finished request."""
        for owner, stop in self._in_flight.values():
            if owner is group:
                stop.set()

    def close(self) -> None:
        for _, stop in self._in_flight.values():
            stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _load(
        self, item: MediaItem, needed: Collection[int], group: SequenceGroup, stop: Stop
    ) -> None:
        failure: VlmServeError | None = None
        prompt: Prompt | None = None
        try:
            prompt = _load(item, needed, group.request.prompt, stop)
        except VlmServeError as error:
            failure = error
        except Exception:
            _log.exception("a medium could not be decoded again")
            failure = VlmServeError("a medium could not be decoded again", code="internal_error")
        self._post(lambda: self._done(item, group, failure, prompt))

    def _done(
        self,
        item: MediaItem,
        group: SequenceGroup,
        failure: VlmServeError | None,
        prompt: Prompt | None,
    ) -> None:
        self._in_flight.pop(item, None)
        self._media.loading.pop(item, None)
        if group.finished:
            return
        if failure is not None:
            self._fail(group, failure)
        elif prompt is not None:
            self._restart(group, prompt)


def _load(item: MediaItem, needed: Collection[int], prompt: Prompt, stop: Stop) -> Prompt | None:
    """Decode spans of a medium. If it differs from its record, return the corrected prompt."""
    try:
        item.load(stop, needed)
    except UnconfirmedError:
        if prompt.corrected is None:
            raise
        return prompt.corrected()
    return None
