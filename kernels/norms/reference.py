"""Reference RMS norms, the oracles of tests."""

from __future__ import annotations

import torch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `rms_norm` in float64 and return float64."""
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (1 + weight.double())


def gated_rms_norm_reference(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Compute `gated_rms_norm` in float64 and return float64."""
    wide, gate = x.double(), gate.double()
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return normed * weight.double() * gate / (1 + (-gate).exp())
