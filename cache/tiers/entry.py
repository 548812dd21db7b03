"""What a lower tier stores: one value under a 32-byte key, with a header that says what it is.

The key names everything the bytes depend on. The header repeats it all the same, so that a
value written by another model, type, version or layout, or one that has been damaged, is recognised
by itself and treated as a miss.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

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
    embeddings of a media span, what is known of an uploaded file."""

    KV = 1
    STATE = 2
    EXPERTS = 3
    EMBEDDINGS = 4
    UPLOAD = 5


OF_PROMPTS = frozenset({Kind.KV, Kind.STATE, Kind.EXPERTS})
"""Those whose key is that of a node; others are keyed by a medium."""


class EntryId(NamedTuple):
    """`key` is that of the trie's node, of the embeddings or of the upload; the others say which
    part of a model that is split."""

    kind: Kind
    key: bytes
    rank: int = 0
    world: int = 1


class BadEntryError(Exception):
    """The bytes are not the entry that was asked for. Never shown to users: it is a miss."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What all entries of one engine have in common.

    Attributes:
        model: 32 bytes; the root key without a tenant, which covers weights, types, block and chunk
            size, processor and numerics.
        rank, world: which part of a model that is split over how many devices.
    """

    model: bytes
    rank: int = 0
    world: int = 1

    def id(self, kind: Kind, key: bytes) -> EntryId:
        """The id of this engine's value under a key."""
        return EntryId(kind, key, self.rank, self.world)


@dataclass(frozen=True, slots=True)
class Entry:
    """One value.

    Attributes:
        id: kind and key.
        num_tokens: tokens covered by the KV, expert or embedding rows; of a state, its position; of
            an upload, its media spans.
        exact: computed by prefill alone, on an exact prefix.
        layout: types and shapes in words; the reader compares it with its own.
        payload: the bytes.
    """

    id: EntryId
    num_tokens: int
    exact: bool
    layout: str
    payload: bytes

    @property
    def num_bytes(self) -> int:
        """Size with the header."""
        layout = len(self.layout.encode())
        return _FIXED.size + layout + CHECKSUM_BYTES + len(self.payload)


@dataclass(frozen=True, slots=True)
class Sealed:
    """An entry as it is stored: header (with the checksum of header and payload) and payload."""

    header: bytes
    payload: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.header) + len(self.payload)


class Outline(NamedTuple):
    """What a header says of its payload, tokens covered and bytes; and its own size."""

    num_tokens: int
    num_bytes: int
    header_bytes: int


def outline(data: bytes) -> Outline | None:
    """What the header at the beginning says, nothing of which is verified; None if it is none."""
    if len(data) < _FIXED.size:
        return None
    fields = _FIXED.unpack_from(data)
    size = _FIXED.size + fields[9] + CHECKSUM_BYTES
    whole = fields[0] == MAGIC and size <= min(len(data), MAX_HEADER_BYTES)
    return Outline(fields[8], fields[10], size) if whole else None


def seal(entry: Entry, origin: Origin) -> Sealed:
    """Adds the header."""
    layout = entry.layout.encode()
    assert len(entry.id.key) == len(origin.model) == KEY_BYTES
    assert entry.id[2:] == (origin.rank, origin.world), "another part's entry"
    assert len(layout) <= MAX_LAYOUT_BYTES, "a layout is a short text"
    head = _fixed_header(entry, origin, len(layout)) + layout
    return Sealed(head + _checksum(head, entry.payload), entry.payload)


def _fixed_header(entry: Entry, origin: Origin, layout_bytes: int) -> bytes:
    """The part of the header that has a fixed size."""
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
        len(entry.payload),
    )


def unseal(sealed: Sealed, entry_id: EntryId, origin: Origin) -> Entry:
    """The entry, if it is intact and the one that was asked for.

    Raises:
        BadEntryError: says what is wrong.
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


def _checksum(head: bytes, payload: bytes) -> bytes:
    digest = blake3(head)
    digest.update(payload)
    return digest.digest()
