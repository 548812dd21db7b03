"""Projections of one input with weights in several formats, as one projection.

Each part keeps its own arithmetic. A row's bits depend on the row and the weights alone if this
holds for every part.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import torch

from vlm_serve.kernels.linear.base import ChangedRows, Epilogue, Linear


class Joined(Linear):
    """Projections side by side.

    Args:
        parts: of one depth, in the order of their columns.
    """

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        self.columns = sum(part.columns for part in parts)
        self.depth, self.dtype = parts[0].depth, parts[0].dtype

    def _multiply(self, x: torch.Tensor, after: Epilogue, deterministic: bool) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.columns)
        first = 0
        for part in self.parts:
            own = slice(first, first + part.columns)
            epilogue = after.of(itemgetter((slice(None), own)))
            out[:, own] = part._multiply(x, epilogue, deterministic)
            first = own.stop
        return out

    def _changed(
        self, x: torch.Tensor, after: Epilogue, deterministic: bool, changes: ChangedRows | None
    ) -> torch.Tensor:
        if changes is None:
            return self._multiply(x, after, deterministic)
        parts, first = [], 0
        for part in self.parts:
            epilogue = after.of(itemgetter((slice(None), slice(first, first + part.columns))))
            parts.append(part._changed(x, epilogue, deterministic, changes))
            first += part.columns
        return torch.cat(parts, 1)

    def leaves(self) -> tuple[Linear, ...]:
        return self.parts

    def _gated(self, up: Linear, x: torch.Tensor, deterministic: bool) -> torch.Tensor:
        gate = self(x, activation="silu", deterministic=deterministic)
        return up(x, times=gate, deterministic=deterministic)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)
