"""Copies KV blocks and state rows to host bytes and back."""

from __future__ import annotations

import torch

from vlm_serve.cache.tiers.entry import Entry, Kind
from vlm_serve.engine.core.media_tiers import to_bytes
from vlm_serve.kernels.dispatch import launching_on
from vlm_serve.models.cache_layout import CacheTensors

Staged = tuple[torch.Tensor, ...]


class TensorTransfer:
    """Transfer of the real pools; see `cache.tiers.transfer`."""

    def __init__(self, caches: CacheTensors) -> None:
        self._caches = caches
        self._pin = caches.device.type == "cuda"

    def read_kv(self, block: int, num_tokens: int) -> bytes:
        return to_bytes(self._kv(block, num_tokens))

    def read_state(self, row: int) -> bytes:
        return to_bytes(self._state(row))

    def layout(self, kind: Kind, num_tokens: int) -> str:
        parts = self._kv(0, num_tokens) if kind is Kind.KV else self._state(0)
        return " ".join(f"{part.dtype}{list(part.shape)}" for part in parts).replace("torch.", "")

    def num_bytes(self, kind: Kind, num_tokens: int) -> int | None:
        if kind not in (Kind.KV, Kind.STATE):
            return None
        places = self._kv(0, num_tokens) if kind is Kind.KV else self._state(0)
        return sum(place.numel() * place.element_size() for place in places)

    def stage(self, entry: Entry) -> Staged | None:
        kind, num_tokens = entry.id.kind, entry.num_tokens
        places = self._kv(0, num_tokens) if kind is Kind.KV else self._state(0)
        sizes = [place.numel() * place.element_size() for place in places]
        if entry.layout != self.layout(kind, num_tokens) or sum(sizes) != len(entry.payload):
            return None
        data = torch.frombuffer(bytearray(entry.payload), dtype=torch.uint8)
        if self._pin:
            # On a tier's thread another GPU is current, on which this would open a context.
            with launching_on(self._caches.device):
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
