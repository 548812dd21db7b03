"""Remembers the tokens of pieces of text, so that what was said before is not encoded again.

A piece stands between two special tokens and encodes by itself. A long one is kept in parts, cut
at seams, so that one that grew keeps all but its last part. Names are keyed by the tenant's salt
and a secret of the process: how long a text takes tells nobody what another tenant has sent.
"""

from __future__ import annotations

import os
import random
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from vlm_serve.preprocess.identity.keys import hasher_of
from vlm_serve.preprocess.sized_index import SizedIndex
from vlm_serve.preprocess.text.seams import find_seams
from vlm_serve.preprocess.text.tokenizer import Tokenizer

_DOMAIN = b"vlm-serve known text 1"
_PART_CHARACTERS = 2048
# Memory of an entry without its ids: measured, rounded up.
_ENTRY_BYTES = 320
# Parts above this size may be much more than fits, so a sample is encoded first.
_LARGE, _SAMPLES, _SAMPLE_CHARACTERS = 1 << 14, 8, 1024


@dataclass(frozen=True, slots=True)
class Encoded:
    """A piece of text in tokens.

    Attributes:
        digests: names of its parts, alike for equal parts of one tenant.
        parts: their ids.
    """

    digests: bytes
    parts: tuple[array[int], ...]

    @property
    def ids(self) -> list[int]:
        """The ids as numbers."""
        return [token_id for part in self.parts for token_id in part.tolist()]


class KnownPieces:
    """Encodes pieces of text, with those of earlier prompts at hand. Thread-safe.

    Args:
        tokenizer: the checkpoint's.
        max_bytes: limit on what is kept; 0: nothing.

    Attributes:
        seams: places to cut a text.
        counts: parts that were known ("hits") or not ("misses").
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self.seams = find_seams(tokenizer.backend)
        self._index: SizedIndex[array[int]] = SizedIndex(
            max_bytes, lambda ids: _ENTRY_BYTES + len(ids) * ids.itemsize
        )
        self._secret = os.urandom(32)
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter(hits=0, misses=0)

    @property
    def num_bytes(self) -> int:
        """Memory of all parts."""
        return self._index.num_bytes

    def clear(self) -> None:
        """Forget all parts."""
        self._index.clear()

    def encode(self, text: str, cache_salt: str) -> list[int]:
        """Encode a text in which special tokens are characters like any others."""
        return self.encode_all([text], cache_salt)[0].ids

    def encode_all(
        self,
        texts: Iterable[str],
        cache_salt: str,
        check: Callable[[], None] | None = None,
        unseen: int = 0,
    ) -> list[Encoded]:
        """Encode pieces of one prompt.

        Args:
            cache_salt: the tenant's.
            check: raises if they are far beyond the context. It encodes about as much as fits, so
                it is called once, and only when they come near that; None: they may have any
                length.
            unseen: most tokens of further text that `check` counts.
        """
        texts = list(texts)
        key = hasher_of(_DOMAIN, secret=self._secret, salt=cache_salt).digest()
        room = _Room(self._tokenizer, texts, check)
        room.take(unseen)
        pieces, hits = [], 0
        for text in texts:
            piece, known = self._encode(text, key, room)
            pieces.append(piece)
            hits += known
        with self._lock:
            self.counts["hits"] += hits
            self.counts["misses"] += sum(len(piece.parts) for piece in pieces) - hits
        return pieces

    def _encode(self, text: str, key: bytes, room: _Room) -> tuple[Encoded, int]:
        """Return a piece, and how many of its parts were known."""
        digests, parts, known = [], [], 0
        for part in self.seams.parts(text, _PART_CHARACTERS) if text else ():
            digest = blake3(part.encode("utf-8", "surrogatepass"), key=key).digest()
            ids = self._index.get(digest)
            if ids is not None:
                known += 1
            else:
                room.expect(part)
                ids = array("I", self._tokenizer.encode_plain(part))
                self._index.put(digest, ids)
            room.take(len(ids))
            digests.append(digest)
            parts.append(ids)
        return Encoded(b"".join(digests), tuple(parts)), known


class _Room:
    """Counts the tokens of a prompt, and has them checked once they may be too many."""

    def __init__(
        self, tokenizer: Tokenizer, texts: Sequence[str], check: Callable[[], None] | None
    ) -> None:
        self._tokenizer, self._check = tokenizer, check
        self._left = tokenizer.tokens_before_check
        if self._left is None:
            self._check = None
        elif tokenizer.is_probably_too_long(texts):
            self._call()

    def _call(self) -> None:
        check, self._check = self._check, None
        if check is not None:
            check()

    def take(self, count: int) -> None:
        """Count tokens."""
        if self._check is not None and self._left is not None:
            self._left -= count
            if self._left < 0:
                self._call()

    def expect(self, part: str) -> None:
        """Look at a part before it is encoded: it is large if nothing in it could be cut."""
        size, left = len(part), self._left
        if self._check is None or left is None or size <= max(left, _LARGE):
            return
        # At random: a text cannot be made to look shorter than it is.
        starts = (random.randrange(size - _SAMPLE_CHARACTERS) for _ in range(_SAMPLES))
        samples = (part[start : start + _SAMPLE_CHARACTERS] for start in starts)
        tokens = sum(len(self._tokenizer.encode_plain(sample)) for sample in samples)
        if tokens * size > left * _SAMPLES * _SAMPLE_CHARACTERS:
            self._call()
