"""The tiers' interface to the owner of the memory: content as bytes, and back."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from vlm_serve.cache.records import Rows
from vlm_serve.cache.tiers.entry import Entry, Kind

_EXPERT_TYPES = ("uint8", "int16", "uint16")


class Transfer(Protocol):
    """Reads and writes of the pools happen on the engine's thread; `stage` on any. Staged values
    are opaque to the tiers."""

    def read_kv(self, block: int, num_tokens: int) -> bytes:
        """Return the first tokens of a block."""
        ...

    def read_state(self, row: int) -> bytes: ...

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
