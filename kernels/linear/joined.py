"""Projections of one input with weights in several formats, as one projection.

Each part keeps its own arithmetic. A row's bits depend on the row and the weights alone if this
holds for every part.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from vlm_serve.kernels.linear.base import Activation, Linear


class Joined(Linear):
    """Projections side by side.

    Args:
        parts: of one depth, in the order of their columns.
    """

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        self.columns = sum(part.columns for part in parts)
        self.depth, self.dtype = parts[0].depth, parts[0].dtype

    def __call__(
        self,
        x: torch.Tensor,
        *,
        activation: Activation | None = None,
        times: torch.Tensor | None = None,
        plus: torch.Tensor | None = None,
        deterministic: bool = False,
    ) -> torch.Tensor:
        self._check(x, activation, times, plus)
        out = x.new_empty(x.shape[0], self.columns)
        first = 0
        for part in self.parts:
            own = slice(first, first + part.columns)
            out[:, own] = part(
                x,
                activation=activation,
                times=None if times is None else times[:, own],
                plus=None if plus is None else plus[:, own],
                deterministic=deterministic,
            )
            first = own.stop
        return out

    def gated(self, up: Linear, x: torch.Tensor, *, deterministic: bool = False) -> torch.Tensor:
        gate = self(x, activation="silu", deterministic=deterministic)
        return up(x, times=gate, deterministic=deterministic)

    def record(self) -> ctypes.Structure | None:
        return None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)
