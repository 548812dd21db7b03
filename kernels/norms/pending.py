"""Rows whose norm is still to come: a product may apply it while it reads them."""

from __future__ import annotations

import torch

from vlm_serve.kernels.norms import rms_norm


class Normed:
    """The result of `rms_norm`, computed when somebody asks for it.

    Args:
        raw: `[T, H]`, rows before the norm; they must stay as they are until the last use.
        weight, eps: as `rms_norm` takes them.
    """

    __slots__ = ("_rows", "eps", "raw", "weight")

    def __init__(self, raw: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        self.raw, self.weight, self.eps = raw, weight, eps
        self._rows: torch.Tensor | None = None

    @property
    def rows(self) -> torch.Tensor:
        """The rows behind the norm, `[T, H]`."""
        if self._rows is None:
            self._rows = rms_norm(self.raw, self.weight, self.eps)
        return self._rows
