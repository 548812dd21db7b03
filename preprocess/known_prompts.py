"""Remembers recent prompts, so that the next turn of a conversation only adds to one.

A prompt can be continued behind each of its ends of turns. Such a place is named by a digest of
its root key, and of all pieces and media before it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from vlm_serve.preprocess.identity.keys import PromptKeys
from vlm_serve.preprocess.identity.prompt import MediaSpan
from vlm_serve.preprocess.media.raw_index import pack_record

if TYPE_CHECKING:
    import torch

    from vlm_serve.preprocess.media.processing import MediaRecord

_DOMAIN = b"vlm-serve known prompt 1"
_MOST_PLACES = 256
# Memory by what a prompt holds: measured, rounded up.
_PROMPT_BYTES, _PLACE_BYTES, _BLOCK_BYTES, _SPAN_BYTES, _PIECE_BYTES = 1024, 256, 192, 1024, 40


class Place(NamedTuple):
    """Where a prompt may be continued: behind an end of turn.

    Attributes:
        pieces, media: numbers of pieces and of media before it.
        digest: its name.
    """

    pieces: int
    media: int
    digest: bytes


@dataclass(slots=True)
class Expansion:
    """Token ids under construction.

    Attributes:
        token_ids, spans, media_ends, message_ends: as in `Prompt`.
        piece_starts: number of tokens before each piece.
        records: of every medium so far.
    """

    token_ids: list[int] = field(default_factory=list)
    spans: list[MediaSpan] = field(default_factory=list)
    media_ends: list[int] = field(default_factory=list)
    message_ends: list[int] = field(default_factory=list)
    piece_starts: list[int] = field(default_factory=list)
    records: list[MediaRecord] = field(default_factory=list)

    def until(self, place: Place) -> Expansion:
        """Return a copy of the part before a place."""
        length = self.piece_starts[place.pieces - 1] + 1
        return Expansion(
            self.token_ids[:length],
            self.spans[: bisect_right(self.spans, length, key=lambda span: span.end)],
            self.media_ends[: place.media],
            self.message_ends[: bisect_right(self.message_ends, length)],
            self.piece_starts[: place.pieces],
            self.records[: place.media],
        )


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """A prompt as it was prepared, complete up to a place.

    Attributes:
        place: where it is continued.
        expansion, positions, keys: of the whole prompt; they are only read. Positions of text alone
            follow from its length: None.
    """

    place: Place
    expansion: Expansion
    positions: torch.Tensor | None
    keys: PromptKeys

    @property
    def tokens(self) -> int:
        """Number of tokens before the place."""
        return self.expansion.piece_starts[self.place.pieces - 1] + 1


class Names:
    """Names the places of one prompt.

    Args:
        root: the root key.

    Attributes:
        places: so far.
    """

    def __init__(self, root: bytes) -> None:
        self._hasher = blake3(_DOMAIN, key=root)
        self._pieces = self._media = 0
        self.places: list[Place] = []

    def _add(self, kind: bytes, content: bytes) -> None:
        self._hasher.update(kind + len(content).to_bytes(8, "little") + content)
        self._pieces += 1

    def add_text(self, digests: bytes) -> None:
        """Add a piece of text by the digests of its parts."""
        self._add(b"T", digests)

    def add_medium(self, record: MediaRecord) -> None:
        """Add a medium in place of its special token."""
        self._add(b"M", pack_record(record))
        self._media += 1

    def add_special(self, token_id: int, *, ends_turn: bool) -> None:
        """Add any other special token."""
        self._add(b"S", token_id.to_bytes(8, "little"))
        if ends_turn:
            self.places.append(Place(self._pieces, self._media, self._hasher.digest()))


class KnownPrompts:
    """Recent prompts by the names of their places. Thread-safe.

    Args:
        max_bytes: limit on what is kept; 0: nothing.

    Attributes:
        num_bytes: memory of all prompts.
        counts: prompts that continued a known one ("hits") or did not ("misses").
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._numbers: Iterator[int] = count()
        self._prompts: OrderedDict[int, tuple[KnownPrompt, int, set[bytes]]] = OrderedDict()
        self._places: dict[bytes, tuple[int, Place]] = {}
        self.num_bytes = 0
        self.counts: Counter[str] = Counter(hits=0, misses=0)

    def clear(self) -> None:
        """Forget all prompts."""
        with self._lock:
            self._prompts.clear()
            self._places.clear()
            self.num_bytes = 0

    def find(self, places: Sequence[Place]) -> KnownPrompt | None:
        """Return a known prompt with the deepest of some places; None: no place is known."""
        with self._lock:
            found = next((p.digest for p in reversed(places) if p.digest in self._places), None)
            self.counts["misses" if found is None else "hits"] += 1
            if found is None:
                return None
            number, place = self._places[found]
            self._prompts.move_to_end(number)
            known, _, _ = self._prompts[number]
        return KnownPrompt(place, known.expansion, known.positions, known.keys)

    def put(
        self,
        places: Sequence[Place],
        expansion: Expansion,
        positions: torch.Tensor | None,
        keys: PromptKeys,
    ) -> None:
        """Remember a prompt at its last places; forget earlier prompts that had only these."""
        places = places[-_MOST_PLACES:]
        cost = _cost(places, expansion, keys)
        if not places or cost > self._max_bytes:
            return
        with self._lock:
            number = next(self._numbers)
            for place in places:
                if (old := self._places.get(place.digest)) is not None:
                    self._leave(old[0], place.digest)
                self._places[place.digest] = number, place
            known = KnownPrompt(places[-1], expansion, positions, keys)
            self._prompts[number] = known, cost, {place.digest for place in places}
            self.num_bytes += cost
            while self.num_bytes > self._max_bytes:
                self._forget(next(iter(self._prompts)))

    def _leave(self, number: int, digest: bytes) -> None:
        digests = self._prompts[number][2]
        digests.discard(digest)
        if not digests:
            self._forget(number)

    def _forget(self, number: int) -> None:
        _, cost, digests = self._prompts.pop(number)
        for digest in digests:
            del self._places[digest]
        self.num_bytes -= cost


def _cost(places: Sequence[Place], expansion: Expansion, keys: PromptKeys) -> int:
    """Return the bytes that a prompt counts for."""
    tokens, spans = len(keys), len(expansion.spans)
    return (
        _PROMPT_BYTES
        + _PLACE_BYTES * (len(places) + len(keys.tails))
        + _BLOCK_BYTES * len(keys.block_keys)
        + _PIECE_BYTES * len(expansion.piece_starts)
        + _SPAN_BYTES * spans
        + tokens * (44 + 24 * bool(spans))
    )
