"""RMS norms by torch."""

from __future__ import annotations

import torch

from vlm_serve.kernels.elementwise.reference import silu_times
from vlm_serve.kernels.plain import widened


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return centred(x, weight, eps).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    gate_first: bool = False,
    mean: torch.Tensor | None = None,
) -> torch.Tensor:
    if gate_first:
        return (_unit(silu_times(gate, widened(x)), eps, mean) * weight).to(x.dtype)
    normed = _unit(x, eps) * weight
    return silu_times(gate, normed).to(x.dtype)


def gated_squares(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return silu_times(gate, widened(x)).square().sum(-1)


def centred(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `rms_norm` without rounding to the dtype of x."""
    normed = _unit(x, eps)
    return normed * (1 + weight.to(normed.dtype))


def _unit(x: torch.Tensor, eps: float, mean: torch.Tensor | None = None) -> torch.Tensor:
    wide = widened(x)
    square = wide.square().mean(-1, keepdim=True) if mean is None else mean[..., None]
    return wide * (square + eps).rsqrt()
