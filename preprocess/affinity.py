"""Affinity keys: which requests begin alike, from raw bytes alone (docs/architecture.md#events).

A key covers a prefix of what a request says: salt, model, tools, then turn by turn its texts and
the bytes of its uploads as they are. Nothing is decoded, tokenised or fetched, and every byte is
hashed once. Requests with a common key have a common prefix; that they have one does not say that
anything is cached of it.

What is promised of equal prefixes:

- A conversation that goes on has the keys of what it began as: the first few, and all of its last
  ones until some turns have come behind them; further back fewer of them stay.
- One conversation has the same keys in the forms of /v1/chat/completions, /v1/responses and
  /v1/messages if its texts, uploads, tools and options are the same. Two things are not known here:
  what `previous_response_id` stands for (its turns count as another beginning), and templates.
- Cuts lie at the ends of turns and media and inside of long texts, there an eighth of all text
  before them apart: other questions about one long text share nearly all of its keys.
"""

from __future__ import annotations

import logging
import struct
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from blake3 import blake3

from vlm_serve.preprocess.affinity_turns import (
    Call,
    Medium,
    Part,
    Reasoning,
    Said,
    Turn,
    read_body,
)
from vlm_serve.preprocess.keys import tagged

_log = logging.getLogger(__name__)

AffinityKey: TypeAlias = bytes
"""16 bytes: a digest of 8, then where its prefix ends (`place_of`)."""

KEY_BYTES = 16
MAX_KEYS = 64

BYTES_PER_TOKEN = 4
"""Of text, as a guess."""
BYTES_PER_IMAGE_TOKEN = 270
"""Of a data: URL, as a guess: JPEG of two bits a pixel, a token for 32 x 32 of them."""
MIN_IMAGE_TOKENS, MAX_IMAGE_TOKENS = 64, 4096
URL_TOKENS = {"image": 1024, "video": 4096}
"""As a guess for media that are not in the request, and for all videos."""

_DOMAIN = b"vlm-serve affinity 1"
_DIGEST_BYTES = 8
_PLACE = struct.Struct("<IHH")
_UNIT = 64
_FIRST_CUT, _CUT_SHARE = 1024, 8
# Kept of many cuts: the first ones, the last ones, and of those between the more the later.
_FIRST_KEPT, _LAST_KEPT = 8, 8
# Ends a text. It never occurs in UTF-8, so texts need no length in front and may share beginnings.
_END_OF_TEXT = b"\xff"


class Place(NamedTuple):
    """Where a key's prefix ends.

    Attributes:
        text_bytes: before it, in UTF-8; of token ids four each.
        media: before it.
        media_units: their tokens as a guess, in units of 64.
    """

    text_bytes: int
    media: int
    media_units: int

    @property
    def tokens(self) -> int:
        """About how many tokens that is."""
        return -(-self.text_bytes // BYTES_PER_TOKEN) + self.media_units * _UNIT


@dataclass(frozen=True, slots=True)
class AffinityDigest:
    """What one server says it holds.

    Attributes:
        version: grows with every change.
        entries: (affinity key, tokens held of that prefix), the newest used first.
    """

    version: int = 0
    entries: tuple[tuple[AffinityKey, int], ...] = ()


def place_of(key: AffinityKey) -> Place:
    """Where the prefix of a key ends. Raises struct.error for what is no key."""
    return Place(*_PLACE.unpack(key[_DIGEST_BYTES:]))


def affinity_keys_of_body(
    api: str, body: Mapping[str, Any], *, salt: str, model: str
) -> tuple[AffinityKey, ...]:
    """The keys of a parsed request body, longest prefix first.

    Never raises: a malformed body has the keys of what comes before the fault, perhaps none.

    Args:
        api: "chat", "completions", "responses", "messages" or "generate"; of any other: no keys.
        salt: the tenant's; the same content under another salt has other keys.
        model: the name of the model that answers, whatever the client called it.
    """
    try:
        said = read_body(api, body)
    except Exception:
        _log.debug("a body without affinity keys", exc_info=True)
        return ()
    return affinity_keys(said, salt=salt, model=model)


def affinity_keys(said: Said, *, salt: str, model: str) -> tuple[AffinityKey, ...]:
    """The keys of a prompt, longest prefix first, at most MAX_KEYS. Never raises."""
    chain = _Chain(salt, model)
    try:
        chain.add_front(said.front)
        if said.tokens is not None:
            chain.add_tokens(said.tokens)
        for turn in said.turns:
            chain.add_turn(turn)
    except Exception:
        _log.debug("affinity keys end at a fault", exc_info=True)
    return chain.keys()


class _Chain:
    """Hashes a prompt from its beginning, and takes a digest at every cut."""

    def __init__(self, salt: str, model: str) -> None:
        fields = (tagged("domain", _DOMAIN), tagged("salt", salt), tagged("model", model))
        self._hasher = blake3(b"".join(fields))
        self._cuts: list[AffinityKey] = []
        self._text_bytes = 0
        self._media = 0
        self._media_units = 0
        self._next_cut = _FIRST_CUT
        self._in_text = False

    def keys(self) -> tuple[AffinityKey, ...]:
        last = len(self._cuts) - 1
        kept = [key for index, key in enumerate(self._cuts) if _stays(index, last - index)]
        if len(kept) > MAX_KEYS:
            kept = kept[:_FIRST_KEPT] + kept[_FIRST_KEPT - MAX_KEYS :]
        return tuple(reversed(kept))

    def add_front(self, front: Mapping[str, str]) -> None:
        for name, text in front.items():
            raw = _utf8(text)
            self._hasher.update(tagged(name, raw))
            self._count(len(raw) if name == "tools" else 0)
        if front:
            self._cut()

    def add_tokens(self, ids: Iterable[int]) -> None:
        self._hasher.update(tagged("role", "tokens"))
        self._add_text(memoryview(array("I", ids)).cast("B"))
        self._end_text()
        self._cut()

    def add_turn(self, turn: Turn) -> None:
        role, parts = turn
        self._hasher.update(tagged("role", role))
        for part in parts:
            self._add(part)
        self._end_text()
        self._hasher.update(tagged("end", ""))
        self._cut()

    def _add(self, part: Part) -> None:
        if isinstance(part, str):
            self._add_text(memoryview(_utf8(part)))
            return
        self._end_text()
        if isinstance(part, Medium):
            self._add_medium(part)
        elif isinstance(part, Reasoning):
            self._hasher.update(tagged("reasoning", ""))
            self._add_text(memoryview(_utf8(part.text)))
            self._end_text()
        else:
            assert isinstance(part, Call)
            raw = _utf8(part.arguments)
            self._hasher.update(tagged("call", _utf8(part.name)) + tagged("arguments", raw))
            self._count(len(raw))

    def _add_text(self, raw: memoryview) -> None:
        if not self._in_text and raw:
            self._hasher.update(tagged("text", ""))
            self._in_text = True
        while raw:
            piece = raw[: self._next_cut - self._text_bytes]
            self._hasher.update(piece)
            raw = raw[len(piece) :]
            if self._text_bytes + len(piece) == self._next_cut:
                self._text_bytes += len(piece)
                self._cut()
                self._count(0)
            else:
                self._count(len(piece))

    def _end_text(self) -> None:
        if self._in_text:
            self._hasher.update(_END_OF_TEXT)
            self._in_text = False

    def _add_medium(self, medium: Medium) -> None:
        pieces = [_utf8(piece) for piece in medium.source]
        length = sum(map(len, pieces))
        self._hasher.update(tagged(medium.kind, medium.options) + tagged("bytes", length))
        for piece in pieces:
            self._hasher.update(piece)
        self._media += 1
        self._media_units += _units(medium, length)
        self._cut()

    def _count(self, num_bytes: int) -> None:
        """So much more text; moves the next cut beyond it."""
        self._text_bytes += num_bytes
        while self._next_cut <= self._text_bytes:
            self._next_cut += max(_FIRST_CUT, self._next_cut // _CUT_SHARE)

    def _cut(self) -> None:
        place = _PLACE.pack(
            min(self._text_bytes, 0xFFFFFFFF),
            min(self._media, 0xFFFF),
            min(self._media_units, 0xFFFF),
        )
        self._cuts.append(self._hasher.digest(length=_DIGEST_BYTES) + place)


def _units(medium: Medium, num_bytes: int) -> int:
    """About how many tokens a medium is, in units."""
    tokens = URL_TOKENS[medium.kind]
    if medium.kind == "image" and medium.source[0].startswith("data:"):
        guess = num_bytes // BYTES_PER_IMAGE_TOKEN
        tokens = min(max(guess, MIN_IMAGE_TOKENS), MAX_IMAGE_TOKENS)
    return tokens // _UNIT


def _stays(index: int, age: int) -> bool:
    """Whether a cut is kept that has so many before it and so many behind it: of those that have 8
    to 16 behind them every second, of those with 16 to 32 every fourth, and so on. What has gone
    does not come back when more follows."""
    if index < _FIRST_KEPT or age < _LAST_KEPT:
        return True
    return index % (1 << (age.bit_length() - 3)) == 0


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
