"""Records of marked tails, for servers that have not seen the marks.

Tokens alone do not tell where a marked tail ends, so the lengths of those behind one block lie
under a key of that block, one bit each. Who looks a prompt up there tries its own tails of these
lengths: a record that is missing, old or wrong costs a hit or a look-up, never an answer.
"""

from __future__ import annotations

from vlm_serve.cache.marks import KnownMarks
from vlm_serve.cache.records import Node
from vlm_serve.cache.tiers.entry import Entry, EntryId, Kind, Origin

_LAYOUT = "marks 1"


def record_beside(tail: Node, marks: KnownMarks, origin: Origin) -> Entry | None:
    """Return the record of all known marks behind the same block as a tail; None if the tail has
    no mark. For the engine's thread."""
    known = marks.beside(tail.key)
    if known is None:
        return None
    branch, lengths = known
    return _record(origin.id(Kind.MARKS, branch), sum(1 << length for length in lengths))


def joined(record: Entry, other: Entry) -> Entry:
    """Return the record of the tails in either of two records of one block."""
    return _record(record.id, _bits(record) | _bits(other))


def lengths_in(record: Entry, block_size: int) -> list[int]:
    """Return the lengths that a record lists and that a tail can have; none for another format."""
    return [length for length in range(1, block_size) if _bits(record) >> length & 1]


def _record(block: EntryId, bits: int) -> Entry:
    payload = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
    return Entry(block, bits.bit_count(), True, _LAYOUT, payload)


def _bits(record: Entry) -> int:
    return int.from_bytes(record.payload, "little") if record.layout == _LAYOUT else 0
