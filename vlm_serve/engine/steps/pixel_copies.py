"""Pixels on their way to a GPU: as bytes out of pinned memory, in a stream of their own.

A picture's values are few, so a table of what each becomes replaces float32 pixels of four times
the size. A value has the bits that the host would have computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from vlm_serve.engine.steps.step_tables import Step
from vlm_serve.engine.steps.tier_copies import CopyStream

AT_A_TIME = 8 << 20
"""Pixels looked up at a time, each with a place of four bytes."""
VALUES = 256


def sent_bytes(pixels: int) -> int:
    """Return the most bytes of a device that pixels take beside their values."""
    return pixels + 4 * min(pixels, AT_A_TIME)


class PixelCopies:
    """Sends pixels of pictures.

    Args:
        stream: of the copies.
        device: the GPU.
        dtype: of the tower's input.
    """

    def __init__(self, stream: CopyStream, device: torch.device, dtype: torch.dtype) -> None:
        self._stream, self._device, self._dtype = stream, device, dtype
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def send(self, pixels: torch.Tensor, table: torch.Tensor | None) -> Callable[[], torch.Tensor]:
        """Queue the copy of `[n, patch_dim]` pixels. Return a function that lets later steps wait
        for it, and returns their values on the device.

        Args:
            pixels: uint8 with a table; otherwise the values themselves, float32.
            table: float32 `[channels, 256]`, or None. It is kept on the device.
        """
        source = pixels.contiguous().view(-1).view(torch.uint8)
        memory = self._stream.host_memory(source.numel())
        np.copyto(memory.numpy(), source.numpy())
        target = torch.empty(pixels.shape, dtype=pixels.dtype, device=self._device)
        wait = self._stream.load([target.view(-1).view(torch.uint8)], [memory])
        return partial(self._arrived, target, table, wait)

    def _arrived(
        self, target: torch.Tensor, table: torch.Tensor | None, wait: Step
    ) -> torch.Tensor:
        wait()
        return self._values(target, table)

    def _values(self, pixels: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        if table is None:
            return pixels.to(self._dtype)
        if id(table) not in self._tables:
            self._tables[id(table)] = table, table.to(self._device, self._dtype).view(-1)
        (channels, _), (_, values) = table.shape, self._tables[id(table)]
        out = torch.empty(pixels.shape, dtype=self._dtype, device=self._device)
        first = torch.arange(0, channels * VALUES, VALUES, dtype=torch.int32, device=self._device)
        rows = max(1, AT_A_TIME // pixels.shape[1])
        for begin in range(0, len(pixels), rows):
            part, target = pixels[begin : begin + rows], out[begin : begin + rows]
            places = part.view(len(part), channels, -1).int()
            places += first[:, None]
            torch.index_select(values, 0, places.view(-1), out=target.view(-1))
        return out
