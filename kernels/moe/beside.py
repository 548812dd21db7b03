"""What is added to the routed experts' sum."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Beside(NamedTuple):
    """Terms of a layer's sum beside the routed experts. Each sum is rounded: first that with the
    shared expert, then that with the residual.

    Attributes:
        residual: `[T, H]`.
        shared: `[T, H]`, result of the shared expert, before its gate; None: there is none.
        gate: `[T, 1]`, logits of its gate.
    """

    residual: torch.Tensor
    shared: torch.Tensor | None = None
    gate: torch.Tensor | None = None
