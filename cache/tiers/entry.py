"""The format of a lower tier's entries: one value under a 32-byte key, with a self-describing
header.

The key covers everything on which the bytes depend. The header repeats it, so that a damaged value,
or one of another model, dtype, version or layout, is recognised and treated as a miss.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from blake3 import blake3

MAGIC = b"VLMT"
FORMAT_VERSION = 2
KEY_BYTES = 32
CHECKSUM_BYTES = 32
MAX_LAYOUT_BYTES = 1 << 12

_FIXED = struct.Struct("<4sHBB32s32sHHIHQ")
"""magic, version, kind, exact, key, model, rank, world, tokens, layout length, payload length"""
MAX_HEADER_BYTES = _FIXED.size + MAX_LAYOUT_BYTES + CHECKSUM_BYTES


class Kind(IntEnum):
    """KV rows of a block (or of a tail's part of one), a state snapshot, routed expert rows, vision
    embeddings of a media span, the record of an uploaded file, the record of the marked tails
    behind a block."""

    KV = 1
    STATE = 2
    EXPERTS = 3
    EMBEDDINGS = 4
    UPLOAD = 5
    MARKS = 6


OF_PROMPTS = frozenset({Kind.KV, Kind.STATE, Kind.EXPERTS, Kind.MARKS})
"""Kinds keyed by a node; the others are keyed by a medium."""


class EntryId(NamedTuple):
    """The id of an entry. `key` is the key of the trie's node, of the embeddings or of the upload;
    rank and world select the part of a split model."""

    kind: Kind
    key: bytes
    rank: int = 0
    world: int = 1


class BadEntryError(Exception):
    """The bytes are not the requested entry. Users never see it: it is a miss."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The properties that all entries of one engine share.

    Attributes:
        model: 32 bytes; the root key without a tenant and without the weights, which covers dtypes,
            block and chunk size, processor and numerics. The keys of entries cover the weights.
        rank, world: the part of a model that is split over several devices.
    """

    model: bytes
    rank: int = 0
    world: int = 1

    def id(self, kind: Kind, key: bytes) -> EntryId:
        """Return the id of this engine's value under a key."""
        return EntryId(kind, key, self.rank, self.world)


Content = bytes | memoryview


class Arriving(Protocol):
    """Content that a device is still copying."""

    def __len__(self) -> int: ...

    def content(self) -> Content:
        """Wait for it, on any thread, and return it."""
        ...


def here(source: Content | Arriving) -> Content:
    """Return content; waits for it."""
    return source if isinstance(source, Content) else source.content()


@dataclass(frozen=True, slots=True)
class Entry:
    """One value.

    Attributes:
        id: kind and key.
        num_tokens: tokens covered by the KV, expert or embedding rows; of a state, its position; of
            an upload, its media spans; of marks, the tails.
        exact: computed by prefill alone, on an exact prefix.
        layout: dtypes and shapes as text; the reader compares it with its own.
        source: the bytes, or what has them when they have arrived.
    """

    id: EntryId
    num_tokens: int
    exact: bool
    layout: str
    source: Content | Arriving

    @property
    def payload(self) -> Content:
        """The bytes; waits for them."""
        return here(self.source)

    @property
    def num_bytes(self) -> int:
        """Size with the header."""
        layout = len(self.layout.encode())
        return _FIXED.size + layout + CHECKSUM_BYTES + len(self.source)


@dataclass(frozen=True, slots=True)
class Sealed:
    """An entry as stored: header (with the checksum of header and payload) and payload."""

    header: bytes
    payload: Content

    @property
    def num_bytes(self) -> int:
        return len(self.header) + len(self.payload)


class Outline(NamedTuple):
    """A header's claims: tokens covered and bytes of the payload; and the header's own size."""

    num_tokens: int
    num_bytes: int
    header_bytes: int


def outline(data: bytes) -> Outline | None:
    """Return the claims of the header at the beginning, unverified; None if it is no header."""
    if len(data) < _FIXED.size:
        return None
    fields = _FIXED.unpack_from(data)
    size = _FIXED.size + fields[9] + CHECKSUM_BYTES
    whole = fields[0] == MAGIC and size <= min(len(data), MAX_HEADER_BYTES)
    return Outline(fields[8], fields[10], size) if whole else None


def seal(entry: Entry, origin: Origin) -> Sealed:
    """Return the entry with its header."""
    layout = entry.layout.encode()
    assert len(entry.id.key) == len(origin.model) == KEY_BYTES
    assert entry.id[2:] == (origin.rank, origin.world), "another part's entry"
    assert len(layout) <= MAX_LAYOUT_BYTES, "a layout is a short text"
    head = _fixed_header(entry, origin, len(layout)) + layout
    return Sealed(head + _checksum(head, entry.payload), entry.payload)


def _fixed_header(entry: Entry, origin: Origin, layout_bytes: int) -> bytes:
    """Return the part of the header with a fixed size."""
    return _FIXED.pack(
        MAGIC,
        FORMAT_VERSION,
        entry.id.kind,
        entry.exact,
        entry.id.key,
        origin.model,
        origin.rank,
        origin.world,
        entry.num_tokens,
        layout_bytes,
        len(entry.source),
    )


def unseal(sealed: Sealed, entry_id: EntryId, origin: Origin) -> Entry:
    """Return the entry if it is intact and the requested one.

    Raises:
        BadEntryError: with the fault.
    """
    header, payload = sealed.header, sealed.payload
    if len(header) < _FIXED.size + CHECKSUM_BYTES:
        raise BadEntryError("the header is cut off")
    magic, version, kind, exact, key, model, rank, world, num_tokens, layout_bytes, length = (
        _FIXED.unpack_from(header)
    )
    if magic != MAGIC:
        raise BadEntryError("not an entry")
    if version != FORMAT_VERSION:
        raise BadEntryError(f"format version {version}, not {FORMAT_VERSION}")
    if EntryId(kind, key, rank, world) != entry_id:
        raise BadEntryError("another entry's bytes")
    if (model, rank, world) != (origin.model, origin.rank, origin.world):
        raise BadEntryError("written by another model")
    end = _FIXED.size + layout_bytes
    if len(header) != end + CHECKSUM_BYTES or length != len(payload):
        raise BadEntryError("the length is wrong")
    if _checksum(header[:end], payload) != header[end:]:
        raise BadEntryError("the checksum is wrong")
    layout = header[_FIXED.size : end].decode("utf-8", "replace")
    return Entry(entry_id, num_tokens, bool(exact), layout, payload)


def _checksum(head: bytes, payload: Content) -> bytes:
    digest = blake3(head)
    digest.update(payload)
    return digest.digest()
