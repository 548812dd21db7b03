"""Affinity keys: digests of how requests begin (docs/architecture.md#events).

A key covers a prefix of a request's content. First come the salt, the model and the tools, then the
texts and the raw upload bytes of each turn. Nothing is decoded, tokenised or fetched, and every
byte is hashed once. Requests with a common key have a common prefix. A common prefix does not imply
that any of it is cached.

Guarantees for equal prefixes:

- A longer conversation keeps the keys of its beginning. The first few keys always stay. The last
  ones stay until several more turns follow; further back they are thinned out.
- A conversation has the same keys in the forms of /v1/chat/completions, /v1/responses and
  /v1/messages if its texts, uploads, tools and options are the same. Two things are unknown here:
  templates, and the turns behind `previous_response_id`. Those count as a different beginning.
- Cuts lie at the ends of turns and media. Inside a long text, the distance to the next cut is an
  eighth of all text before it. Different questions about one long text thus share nearly all of its
  keys.
"""

from __future__ import annotations

import json
import logging
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from vlm_serve.preprocess.identity.keys import hasher_of, tagged
from vlm_serve.preprocess.reading.conversation import REASONING_KEYS, Conversation, MediaPart
from vlm_serve.preprocess.reading.reader import read_conversation

_log = logging.getLogger(__name__)

AffinityKey: TypeAlias = bytes
"""16 bytes: a digest of 8, then the end of the key's prefix (`place_of`)."""

KEY_BYTES = 16
MAX_KEYS = 64

BYTES_PER_TOKEN = 4
"""An estimate for text."""
BYTES_PER_IMAGE_TOKEN = 270
"""An estimate for a data: URL: JPEG at two bits a pixel, one token for 32 x 32 pixels."""
MIN_IMAGE_TOKENS, MAX_IMAGE_TOKENS = 64, 4096
URL_TOKENS = {"image": 1024, "video": 4096}
"""Estimates for media outside of the request, and for all videos."""

_DOMAIN = b"vlm-serve affinity 1"
_DIGEST_BYTES = 8
_PLACE = struct.Struct("<IHH")
_UNIT = 64
_FIRST_CUT, _CUT_SHARE = 1024, 8
# Thinning: the first and the last cuts are kept; in between, later cuts are kept more densely.
_FIRST_KEPT, _LAST_KEPT = 8, 8
# Terminates a text. UTF-8 never contains this byte, so texts need no length prefix and can share
# their beginnings.
_END_OF_TEXT = b"\xff"


class Place(NamedTuple):
    """End of a key's prefix.

    Attributes:
        text_bytes: text before this place, in UTF-8 bytes; a token id counts as four.
        media: number of media before this place.
        media_units: the estimated tokens of these media, in units of 64.
    """

    text_bytes: int
    media: int
    media_units: int

    @property
    def tokens(self) -> int:
        """Estimated number of tokens in the prefix."""
        return -(-self.text_bytes // BYTES_PER_TOKEN) + self.media_units * _UNIT


@dataclass(frozen=True, slots=True)
class AffinityDigest:
    """Prefixes reported by a server as held.

    Attributes:
        version: grows with every change.
        entries: pairs of an affinity key and the tokens held of its prefix, most recently used
            first.
    """

    version: int = 0
    entries: tuple[tuple[AffinityKey, int], ...] = ()


def place_of(key: AffinityKey) -> Place:
    """Return where a key's prefix ends. Raises struct.error if the key is malformed."""
    return Place(*_PLACE.unpack(key[_DIGEST_BYTES:]))


def affinity_keys_of_body(
    api: str, body: Mapping[str, Any], *, salt: str, model: str
) -> tuple[AffinityKey, ...]:
    """Return the keys of a parsed request body, longest prefix first.

    Never raises: a body that cannot be read has no keys.

    Args:
        api: see `read_conversation`.
        salt: the tenant's; the same content under another salt has other keys.
        model: the name of the model that answers, whatever the client called it.
    """
    try:
        conversation = read_conversation(api, body)
    except Exception:  # a malformed body may raise anything; its route reports the error
        _log.debug("a body without affinity keys", exc_info=True)
        return ()
    return affinity_keys(conversation, salt=salt, model=model)


def affinity_keys(conversation: Conversation, *, salt: str, model: str) -> tuple[AffinityKey, ...]:
    """Return the keys of a conversation, longest prefix first, at most MAX_KEYS. Never raises."""
    chain = _Chain(salt, model)
    try:
        chain.add_front(front_of(conversation))
        for prompt in (conversation.prompts or ())[:1]:
            if isinstance(prompt, str):
                chain.add_turn("prompt", [prompt])
            else:
                chain.add_tokens(prompt)
        for role, parts in turns_of(conversation):
            chain.add_turn(role, parts)
    except Exception:
        _log.debug("affinity keys end at a fault", exc_info=True)
    return chain.keys()


def turn_digests(conversation: Conversation) -> Iterator[bytes]:
    """Yield a digest of a conversation's texts and uploads up to the end of each message."""
    chain = _Chain("", "")
    for role, parts in turns_of(conversation):
        chain.add_turn(role, parts)
        yield chain.last


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call: a function's name and its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning before an answer."""

    text: str


Part = str | MediaPart | Call | Reasoning


def turns_of(conversation: Conversation) -> Iterator[tuple[str, list[Part]]]:
    """Yield the role and the content of each message, in the order in which they are rendered."""
    media = iter(conversation.media)
    for message in conversation.messages:
        reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
        parts: list[Part] = [Reasoning(reasoning)] if reasoning else []
        content = message["content"]
        for part in [content] if isinstance(content, str) else content or ():
            text = part if isinstance(part, str) else part.get("text")
            parts.append(next(media) if text is None else text)
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            parts.append(Call(function["name"], _json(function["arguments"])))
        yield message["role"], parts


def front_of(conversation: Conversation) -> dict[str, str]:
    """Return the fields that come before all turns or change all of them, by name."""
    front = {}
    if conversation.tools:
        functions = [tool.get("function", tool) for tool in conversation.tools]
        front["tools"] = _json(
            [
                [function["name"], function.get("description"), function.get("parameters") or {}]
                for function in functions
            ]
        )
    # Templates read this switch at a prompt's end: everything before is the same either way.
    kwargs = {k: v for k, v in conversation.template_kwargs.items() if k != "enable_thinking"}
    given = (conversation.media_io_kwargs, conversation.mm_processor_kwargs, kwargs)
    options = [
        {name: value for name, value in (values or {}).items() if value is not None}
        for values in given
    ]
    if any(options):
        front["options"] = _json(options)
    if conversation.previous:
        front["after"] = conversation.previous
    return front


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class _Chain:
    """Hashes a prompt from its beginning and takes a digest at every cut."""

    def __init__(self, salt: str, model: str) -> None:
        self._hasher = hasher_of(_DOMAIN, salt=salt, model=model)
        self._cuts: list[AffinityKey] = []
        self._text_bytes = 0
        self._media = 0
        self._media_units = 0
        self._next_cut = _FIRST_CUT
        self._in_text = False

    @property
    def last(self) -> AffinityKey:
        """The digest at the latest cut."""
        return self._cuts[-1]

    def keys(self) -> tuple[AffinityKey, ...]:
        last = len(self._cuts) - 1
        kept = [key for index, key in enumerate(self._cuts) if _is_kept(index, last - index)]
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

    def add_turn(self, role: str, parts: Iterable[Part]) -> None:
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
        if isinstance(part, MediaPart):
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

    def _add_medium(self, medium: MediaPart) -> None:
        pieces = [_utf8(piece) for piece in medium.texts if piece]
        length = sum(map(len, pieces))
        options = json.dumps(medium.options, sort_keys=True) if medium.options else ""
        self._hasher.update(tagged(medium.modality, options) + tagged("bytes", length))
        for piece in pieces:
            self._hasher.update(piece)
        self._media += 1
        self._media_units += _units(medium, length)
        self._cut()

    def _count(self, num_bytes: int) -> None:
        """Count more text and move the next cut beyond it."""
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


def _units(medium: MediaPart, num_bytes: int) -> int:
    """Estimate the tokens of a medium, in units."""
    tokens = URL_TOKENS[medium.modality]
    if medium.modality == "image" and medium.texts[0].startswith("data:"):
        guess = num_bytes // BYTES_PER_IMAGE_TOKEN
        tokens = min(max(guess, MIN_IMAGE_TOKENS), MAX_IMAGE_TOKENS)
    return tokens // _UNIT


def _is_kept(index: int, age: int) -> bool:
    """Return True if a cut is kept, given the number of cuts before it and after it (its age).

    Every second cut is kept at an age of 8 to 15, every fourth at 16 to 31, and so on. A cut
    dropped once stays dropped as the prompt grows.
    """
    if index < _FIRST_KEPT or age < _LAST_KEPT:
        return True
    return index % (1 << (age.bit_length() - 3)) == 0


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
