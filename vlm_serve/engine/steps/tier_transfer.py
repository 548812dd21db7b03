"""Copies KV blocks and state rows to host bytes and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from vlm_serve.cache.tiers.entry import Arriving, Content, Entry, Kind
from vlm_serve.engine.core.media_tiers import to_bytes
from vlm_serve.engine.requests.plan import StepPlan
from vlm_serve.engine.steps.pixel_copies import PixelCopies
from vlm_serve.engine.steps.tier_copies import (
    Arrivals,
    CopyStream,
    Place,
    SaveRing,
    Saving,
    room_bytes,
)
from vlm_serve.kernels.dispatch import launching_on
from vlm_serve.models.cache_layout import CacheTensors

Staged = tuple[torch.Tensor, ...]


class TensorTransfer:
    """Transfer of the real pools; see `cache.tiers.transfer`. On a GPU no step waits for what is
    read, and one that needs what is written waits for that alone.

    Args:
        caches: the pools.
        streams: of the copies to the host and of those to the device; None: those of a GPU, and
            none on a CPU.
    """

    def __init__(
        self, caches: CacheTensors, streams: tuple[CopyStream, CopyStream] | None = None
    ) -> None:
        self._caches = caches
        if streams is None and caches.device.type == "cuda":
            streams = CopyStream(caches.device), CopyStream(caches.device)
        self._streams = streams
        self._ring: SaveRing | None = None
        self.arrivals = None if streams is None else Arrivals(streams[1])

    def read_kv(self, block: int, num_tokens: int) -> Content | Arriving:
        return self._read(("block", block), self._kv(block, num_tokens))

    def read_state(self, row: int) -> Content | Arriving:
        return self._read(("row", row), self._state(row))

    def read_rows(self, rows: torch.Tensor) -> Content | Arriving:
        """Return the content of a tensor that no step overwrites."""
        if self._streams is None:
            return to_bytes((rows,))
        with launching_on(self._caches.device):
            stream, source = self._streams[0], rows.contiguous().view(-1).view(torch.uint8)
            memory = stream.host_memory(source.numel())
            return Saving(memory, stream.save(memory, source))

    def layout(self, kind: Kind, num_tokens: int) -> str:
        parts = self._kv(0, num_tokens) if kind is Kind.KV else self._state(0)
        return " ".join(f"{part.dtype}{list(part.shape)}" for part in parts).replace("torch.", "")

    def num_bytes(self, kind: Kind, num_tokens: int) -> int | None:
        if kind not in (Kind.KV, Kind.STATE):
            return None
        return sum(_sizes(self._kv(0, num_tokens) if kind is Kind.KV else self._state(0)))

    def stage(self, entry: Entry) -> Staged | None:
        kind, num_tokens = entry.id.kind, entry.num_tokens
        places = self._kv(0, num_tokens) if kind is Kind.KV else self._state(0)
        sizes, payload = _sizes(places), entry.payload
        if entry.layout != self.layout(kind, num_tokens) or sum(sizes) != len(payload):
            return None
        data = self._host_memory(len(payload))
        np.copyto(data.numpy(), np.frombuffer(payload, np.uint8))
        return tuple(
            part.view(place.dtype).view(place.shape)
            for part, place in zip(torch.split(data, sizes), places, strict=True)
        )

    def write_kv(self, block: int, staged: Staged) -> None:
        self._write(("block", block), self._kv(block, staged[0].shape[2]), staged)

    def write_state(self, row: int, staged: Staged) -> None:
        self._write(("row", row), self._state(row), staged)

    def pixels(self, dtype: torch.dtype) -> PixelCopies | None:
        """Return what sends pixels to the device, in the stream of what is loaded; None for a
        CPU."""
        if self._streams is None:
            return None
        return PixelCopies(self._streams[1], self._caches.device, dtype)

    def wait_for(self, plan: StepPlan) -> None:
        """Let a step wait for what it uses of what is being loaded."""
        if self.arrivals:
            self.arrivals.wait_for(_used(plan))

    def wait_for_freed(self, blocks: Iterable[int], rows: Iterable[int]) -> None:
        """Wait in the same way for blocks and rows that are overwritten."""
        if self.arrivals:
            self.arrivals.wait_for(_places(blocks, rows))

    def _read(self, place: Place, parts: Staged) -> Content | Arriving:
        if self._streams is None or self.arrivals is None:
            return to_bytes(parts)
        with launching_on(self._caches.device):
            self.arrivals.wait_for([place])
            if self._ring is None:
                largest = sum(_sizes(self._kv(0, self._caches.block_size)))
                largest = max(largest, sum(_sizes(self._state(0)) if self._caches.num_rows else ()))
                room = room_bytes(largest)
                self._ring = SaveRing(self._streams[0], room, self._caches.device)
            return self._ring.save(parts)

    def _write(self, place: Place, places: Staged, staged: Staged) -> None:
        if self.arrivals is None:
            for target, part in zip(places, staged, strict=True):
                target.copy_(part)
            return
        with launching_on(self._caches.device):
            self.arrivals.load(place, places, staged)

    def _host_memory(self, num_bytes: int) -> torch.Tensor:
        if self._streams is None:
            return torch.empty(num_bytes, dtype=torch.uint8)
        # On a tier's thread another GPU is current, on which this would open a context.
        with launching_on(self._caches.device):
            return self._streams[1].host_memory(num_bytes)

    def _kv(self, block: int, num_tokens: int) -> Staged:
        return tuple(pool[block, :, :, :num_tokens] for pool in self._caches.of_unit("block"))

    def _state(self, row: int) -> Staged:
        return tuple(pool[row] for pool in self._caches.of_unit("row"))


def _sizes(parts: Iterable[torch.Tensor]) -> list[int]:
    return [part.numel() * part.element_size() for part in parts]


def _places(blocks: Iterable[int], rows: Iterable[int]) -> Iterator[Place]:
    yield from (("block", block) for block in blocks)
    yield from (("row", row) for row in rows)


def _used(plan: StepPlan) -> Iterator[Place]:
    """Yield the blocks and rows that sequences of a plan did not have before it, and those that it
    copies and folds. What is loaded comes to a sequence as new."""
    for item in plan.slices:
        rows = (item.src_row, item.dst_row, *(row for _, row in item.snapshots))
        yield from _places(item.blocks, rows)
    for source, target, _ in plan.copies:
        yield from _places((source, target), ())
    for moved in (*plan.row_copies, *(fold[:2] for fold in plan.partial_folds)):
        yield from _places((), moved)
    yield from _places((), (row for row, *_ in plan.folds))
    if plan.rows is not None:
        for changed in plan.rows.blocks:
            yield from _places(changed.blocks, ())
        yield from _places((), (row for _, row in plan.rows.snapshots))
