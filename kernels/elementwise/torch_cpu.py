"""Products with sigmoid and SiLU, torch path."""

from __future__ import annotations

import torch


def times_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    denominator = torch.neg(gate.float()).exp_().add_(1)
    if x.dtype == torch.float32 and denominator.shape == x.shape:
        return torch.div(x, denominator, out=denominator)
    return (x / denominator).to(x.dtype)


def silu_times(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    wide = gate.float()
    denominator = torch.neg(wide).exp_().add_(1)
    return torch.div(wide, denominator, out=denominator).mul_(x).to(x.dtype)
