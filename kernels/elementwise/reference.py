"""Products with sigmoid and SiLU by torch."""

from __future__ import annotations

import torch

from vlm_serve.kernels.plain import widened


def times_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return (x / torch.neg(widened(gate)).exp_().add_(1)).to(x.dtype)


def silu_times(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    wide = widened(gate)
    return (wide / torch.neg(wide).exp_().add_(1) * x).to(x.dtype)
