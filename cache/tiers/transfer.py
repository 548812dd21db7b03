"""What the tiers need of whoever owns the memory: content as bytes, and back."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from vlm_serve.cache.records import Rows
from vlm_serve.cache.tiers.entry import Entry, Kind

_EXPERT_TYPES = ("uint8", "int16", "uint16")


class Transfer(Protocol):
    """Reads and writes of the pools happen on the engine's thread; `stage` on any. What is staged
    means something to the implementation only."""

    def read_kv(self, block: int, num_tokens: int) -> bytes:
        """The first tokens of a block."""
        ...

    def read_state(self, row: int) -> bytes: ...

    def layout(self, kind: Kind, num_tokens: int) -> str:
        """Types and shapes of what `read_kv` and `read_state` return."""
        ...

    def num_bytes(self, kind: Kind, num_tokens: int) -> int | None:
        """Bytes of what `read_kv` and `read_state` return; None for other kinds."""
        ...

    def stage(self, entry: Entry) -> Any | None:
        """Prepares bytes for writing; None if they are not of this engine's layout."""
        ...

    def write_kv(self, block: int, staged: Any) -> None: ...

    def write_state(self, row: int, staged: Any) -> None: ...


def expert_layout(rows: Rows) -> str:
    """Type and shape of expert rows `[tokens, layers, top_k]`."""
    return f"experts {rows.dtype.name} " + "x".join(str(size) for size in rows.shape)


def expert_rows(entry: Entry) -> Rows | None:
    """Expert rows from bytes; None if they are not what their layout says."""
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
