"""The tiers' interface to the owner of the memory: content as bytes, and back."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from vlm_serve.cache.records import Node, Rows, Snapshot
from vlm_serve.cache.tiers.entry import Arriving, Content, Entry, EntryId, Kind

_EXPERT_TYPES = ("uint8", "int16", "uint16")


class Transfer(Protocol):
    """Reads and writes of the pools happen on the engine's thread; `stage` on any. Staged values
    are opaque to the tiers. What is read may still arrive while the block or row is used again."""

    def read_kv(self, block: int, num_tokens: int) -> Content | Arriving:
        """Return the first tokens of a block."""
        ...

    def read_state(self, row: int) -> Content | Arriving: ...

    def layout(self, kind: Kind, num_tokens: int) -> str:
        """Return the dtypes and shapes of `read_kv`'s and `read_state`'s results."""
        ...

    def num_bytes(self, kind: Kind, num_tokens: int) -> int | None:
        """Return the size of `read_kv`'s and `read_state`'s results; None for other kinds."""
        ...

    def stage(self, entry: Entry) -> Any | None:
        """Prepare bytes for writing; return None if their layout is not this engine's."""
        ...

    def write_kv(self, block: int, staged: Any) -> None: ...

    def write_state(self, row: int, staged: Any) -> None: ...


def read_entry(transfer: Transfer, entry_id: EntryId, source: Node | Snapshot) -> Entry | None:
    """Return the content of a node or snapshot, read on the engine's thread; None if it has been
    evicted, or has no such rows."""
    if isinstance(source, Snapshot):
        if source.node is None:
            return None
        layout, state = transfer.layout(Kind.STATE, 0), transfer.read_state(source.row)
        return Entry(entry_id, source.position, source.exact, layout, state)
    if source.parent.children.get(source.key) is not source:
        return None
    count = source.num_tokens
    content: Content | Arriving
    if entry_id.kind is Kind.EXPERTS:
        rows = source.experts
        if rows is None:
            return None
        layout, content = expert_layout(rows), rows.tobytes()
    else:
        layout, content = transfer.layout(Kind.KV, count), transfer.read_kv(source.block.id, count)
    return Entry(entry_id, count, source.exact, layout, content)


def expert_layout(rows: Rows) -> str:
    """Return dtype and shape of expert rows `[tokens, layers, top_k]`."""
    return f"experts {rows.dtype.name} " + "x".join(str(size) for size in rows.shape)


def expert_rows(entry: Entry) -> Rows | None:
    """Return expert rows from bytes; None if they do not match their layout."""
    words = entry.layout.split(" ")
    if len(words) != 3 or words[0] != "experts" or words[1] not in _EXPERT_TYPES:
        return None
    shape = tuple(int(size) for size in words[2].split("x") if size.isdecimal())
    dtype = np.dtype(words[1])
    if len(shape) != 3 or shape[0] != entry.num_tokens:
        return None
    if math.prod(shape) * dtype.itemsize != len(entry.payload):
        return None
    return np.frombuffer(entry.payload, dtype).reshape(shape)
