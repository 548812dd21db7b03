"""The change of one module's weight by an adapter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlm_serve.kernels.linear.packed import PANEL


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of one module's weight: `scale * up @ down`.

    Attributes:
        down: A, `[rank, in]`.
        up: B, `[out, rank]`.
        scale: alpha over the rank, or over its root.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        """Rows of A."""
        return int(self.down.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return self.down.nbytes + self.up.nbytes

    @property
    def layout_bytes(self) -> int:
        """Bytes of both factors as compiled code takes them, about: A in panels of 32 rows, B in
        float32."""
        panels = -(-self.rank // PANEL)
        return panels * PANEL * self.down.shape[1] * self.down.itemsize + 4 * self.up.numel()
