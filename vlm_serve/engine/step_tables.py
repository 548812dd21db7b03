"""The tables that a captured step reads: at fixed addresses on a device, sent in one copy.

The host runs ahead of the device. A copy out of pinned memory reads it when all that was queued
before is done, which may be after the next step was planned. So tables are filled in a ring of host
buffers, and one is filled again only when its last copy has been made.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vlm_serve.engine.graph_device import GraphDevice, Step

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Types and shapes of tables, by name."""
Parts = Mapping[str, dict[str, torch.Tensor]]
"""Tables by part of a step and name."""

_ALIGNMENT = 16
"""Bytes at which tables start: Triton specialises kernels on the alignment of their pointers."""
_BUFFERS = 2
"""One is filled while the other's copy waits for the step before: the device always has a step."""


class HostRing:
    """Host buffers out of which copies are queued in turn; shared by steps of all sizes.

    Args:
        device: what copies.
    """

    def __init__(self, device: GraphDevice) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * _BUFFERS
        self._reads: list[Step | None] = [None] * _BUFFERS
        self._next = 0

    def reserve(self, num_bytes: int) -> None:
        """Make room for tables of so many bytes; between steps."""
        for place, buffer in enumerate(self._buffers):
            if buffer.numel() < num_bytes:
                self._wait(place)
                self._buffers[place] = self._device.host_memory(num_bytes)

    def take(self) -> torch.Tensor:
        """Return the next buffer, to be filled; what it holds is of some step before."""
        self._wait(self._next)
        return self._buffers[self._next]

    def send(self, target: torch.Tensor) -> None:
        """Queue the copy of what `take` returned to the device."""
        source = self._buffers[self._next][: target.numel()]
        self._reads[self._next] = self._device.send(target, source)
        self._next = (self._next + 1) % _BUFFERS

    def _wait(self, place: int) -> None:
        read, self._reads[place] = self._reads[place], None
        if read is not None:
            read()


class StepTables:
    """All tables of one captured step, in one piece of memory.

    Args:
        parts: what they are, by part of the step.
        ring: host buffers to fill.
        device: where the step reads them.

    Attributes:
        fixed: the tables on the device, zeros at first.
    """

    def __init__(self, parts: Mapping[str, Shapes], ring: HostRing, device: torch.device) -> None:
        self._parts, self._ring = parts, ring
        sizes = [
            _num_bytes(dtype, shape)
            for tables in parts.values()
            for dtype, shape in tables.values()
        ]
        # Read and written inside and outside of inference mode.
        with torch.inference_mode(False):
            ring.reserve(sum(sizes))
            self._device = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        self.fixed = self._carve(self._device)

    def stage(self) -> Parts:
        """Return host tables to fill, all of them: they hold what was sent before."""
        return self._carve(self._ring.take())

    def send(self) -> None:
        """Queue the copy of what `stage` returned to the device."""
        self._ring.send(self._device)

    def _carve(self, flat: torch.Tensor) -> Parts:
        carved: dict[str, dict[str, torch.Tensor]] = {}
        place = 0
        for part, tables in self._parts.items():
            carved[part] = {}
            for name, (dtype, shape) in tables.items():
                end = place + torch.Size(shape).numel() * dtype.itemsize
                carved[part][name] = flat[place:end].view(dtype).view(shape)
                place += _num_bytes(dtype, shape)
        return carved


def _num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Count a table's bytes, up to where the next one may start."""
    return -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
