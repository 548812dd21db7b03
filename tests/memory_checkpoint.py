"""A checkpoint whose tensors lie in memory."""

from __future__ import annotations

import torch


class MemoryCheckpoint(dict[str, torch.Tensor]):
    """Tensors by name, as formats of weights ask for them."""

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return tuple(self[name].shape) if name in self else None

    def stored(self, name: str) -> torch.Tensor:
        return self[name]
