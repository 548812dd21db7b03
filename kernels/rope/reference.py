"""Reference query/key norm and partial rotation, the oracle of tests."""

from __future__ import annotations

import torch


def qk_norm_rope_reference(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """Normalise and rotate one of q and k, `[T, H, D]`, pair by pair in float64."""
    wide = x.double()
    wide = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (1 + weight.double())
    out = wide.clone()
    half = cos.shape[1]
    for i in range(half):
        c, s = cos[:, None, i].double(), sin[:, None, i].double()
        out[..., i] = wide[..., i] * c - wide[..., i + half] * s
        out[..., i + half] = wide[..., i + half] * c + wide[..., i] * s
    return out
