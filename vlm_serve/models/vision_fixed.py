"""A vision tower over inputs at fixed addresses, for captured runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vlm_serve.kernels.segment_attention import segment_attention

Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of every picture to itself: queries and keys `[n, 2, heads, d]`, values `[n, heads, d]`
to `[n, heads, d]`."""


class FixedTower:
    """A tower over inputs at fixed addresses. Its attention reads the bounds of pictures from a
    table on the device.

    Args:
        prepared: returns a grid's position embeddings and turns, see `VisionTower.prepared`.
        run: embeds patches, see `VisionTower.run`.
        patches: `[most, patch_dim]`, written by `fill`.
        hidden, heads: of the tower.
        area: patches of a token.

    Attributes:
        area, heads, head_dim: see `FixedTower` of models/spec.py.
    """

    def __init__(
        self,
        prepared: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]],
        run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Attend], torch.Tensor],
        patches: torch.Tensor,
        *,
        hidden: int,
        heads: int,
        area: int,
    ) -> None:
        self._prepared, self._run, self._patches = prepared, run, patches
        self.area, self.heads, self.head_dim = area, heads, hidden // heads
        most = len(patches)
        self._positions = patches.new_zeros(most, hidden)
        self._turns = patches.new_zeros(2, most, self.head_dim // 2, dtype=torch.float32)

    @torch.inference_mode()
    def fill(self, patches: torch.Tensor, grids: Sequence[tuple[int, int, int]]) -> None:
        """Implement `FixedTower.fill` of models/spec.py."""
        self._patches[: len(patches)].copy_(patches)
        begin = 0
        for _, height, width in grids:
            own = slice(begin, begin + height * width)
            self._positions[own], self._turns[:, own] = self._prepared(height, width)
            begin = own.stop

    def run(self, size: int, tiles: torch.Tensor) -> torch.Tensor:
        """Implement `FixedTower.run` of models/spec.py."""

        def attend(qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return segment_attention(qk[:, 0], qk[:, 1], v, tiles, scale=self.head_dim**-0.5)

        turns = self._turns[:, :size]
        return self._run(self._patches[:size], self._positions[:size], turns, attend)
