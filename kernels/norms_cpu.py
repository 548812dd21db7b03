"""RMS norms, torch CPU path."""

from __future__ import annotations

import torch

from vlm_serve.kernels.elementwise import silu


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if residual is not None:
        residual = x + residual
        x = residual
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = (wide * scale * (1.0 + weight.float())).to(x.dtype)
    return normed if residual is None else (normed, residual)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = weight * normed.to(x.dtype)
    return (normed * silu(gate.float())).to(x.dtype)
