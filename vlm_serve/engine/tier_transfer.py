"""Copies KV blocks, state rows and expert rows to host bytes and back."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch

from vlm_serve.cache.experts import Rows
from vlm_serve.cache.tiers.entry import Entry, Kind
from vlm_serve.models.cache_layout import CacheTensors

Staged = tuple[torch.Tensor, ...]

_EXPERT_TYPES = ("uint8", "int16", "uint16")


class Transfer(Protocol):
    """What the tiers need of whoever owns the memory. Reads and writes of the pools happen on the
    engine's thread; `stage` on any."""

    def read_kv(self, block: int, num_tokens: int) -> bytes:
        """The first tokens of a block."""
        ...

    def read_state(self, row: int) -> bytes: ...

    def layout(self, kind: Kind, num_tokens: int) -> str:
        """Types and shapes of what `read_kv` and `read_state` return."""
        ...

    def stage(self, entry: Entry) -> Staged | None:
        """Prepares bytes for writing; None if they are not of this engine's layout."""
        ...

    def write_kv(self, block: int, staged: Staged) -> None: ...

    def write_state(self, row: int, staged: Staged) -> None: ...


class TensorTransfer:
    """Of the real pools; see `Transfer`."""

    def __init__(self, caches: CacheTensors) -> None:
        self._caches = caches
        self._pin = caches.device.type == "cuda"

    def read_kv(self, block: int, num_tokens: int) -> bytes:
        return _to_bytes(self._kv(block, num_tokens))

    def read_state(self, row: int) -> bytes:
        return _to_bytes(self._state(row))

    def layout(self, kind: Kind, num_tokens: int) -> str:
        parts = self._kv(0, num_tokens) if kind is Kind.KV else self._state(0)
        return " ".join(f"{part.dtype}{list(part.shape)}" for part in parts).replace("torch.", "")

    def stage(self, entry: Entry) -> Staged | None:
        kind, num_tokens = entry.id.kind, entry.num_tokens
        places = self._kv(0, num_tokens) if kind is Kind.KV else self._state(0)
        sizes = [place.numel() * place.element_size() for place in places]
        if entry.layout != self.layout(kind, num_tokens) or sum(sizes) != len(entry.payload):
            return None
        data = torch.frombuffer(bytearray(entry.payload), dtype=torch.uint8)
        if self._pin:
            data = data.pin_memory()
        return tuple(
            part.view(place.dtype).view(place.shape)
            for part, place in zip(torch.split(data, sizes), places, strict=True)
        )

    def write_kv(self, block: int, staged: Staged) -> None:
        self._write(self._kv(block, staged[0].shape[2]), staged)

    def write_state(self, row: int, staged: Staged) -> None:
        self._write(self._state(row), staged)

    def _write(self, places: Staged, staged: Staged) -> None:
        for place, part in zip(places, staged, strict=True):
            place.copy_(part)

    def _kv(self, block: int, num_tokens: int) -> Staged:
        return tuple(pool[block, :, :, :num_tokens] for pool in self._caches.of_unit("block"))

    def _state(self, row: int) -> Staged:
        return tuple(pool[row] for pool in self._caches.of_unit("row"))


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


def _to_bytes(parts: Staged) -> bytes:
    arrays = [part.contiguous().view(-1).view(torch.uint8).cpu().numpy() for part in parts]
    if len(arrays) == 1:
        return arrays[0].tobytes()
    return b"".join(array.data for array in arrays)
