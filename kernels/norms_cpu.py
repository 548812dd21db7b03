"""RMS norms, torch CPU path."""

from __future__ import annotations

import torch

from vlm_serve.kernels.elementwise import silu


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`rsqrt(mean(x ** 2) + eps)` over the last dimension, float32 `[..., 1]`; x is read once."""
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if residual is not None:
        residual = x + residual
        x = residual
    normed = (x.float() * inverse_rms(x, eps)).mul_(weight.float() + 1.0).to(x.dtype)
    return normed if residual is None else (normed, residual)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    normed = (x.float() * inverse_rms(x, eps)).mul_(weight)
    return normed.mul_(silu(gate.float())).to(x.dtype)
