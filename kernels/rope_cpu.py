"""Query/key norm and partial rotation, torch CPU path."""

from __future__ import annotations

import torch

from vlm_serve.kernels.norms_cpu import inverse_rms


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _norm_rotate(q, q_weight, cos, sin, eps), _norm_rotate(k, k_weight, cos, sin, eps)


def _norm_rotate(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    half = cos.shape[-1]
    normed = (x.float() * inverse_rms(x, eps)).mul_(weight.float() + 1.0)
    out = torch.empty(x.shape, dtype=x.dtype)
    first, second = normed[..., :half], normed[..., half : 2 * half]
    torch.addcmul(first * cos, second, sin, value=-1.0, out=out[..., :half])
    torch.addcmul(second * cos, first, sin, out=out[..., half : 2 * half])
    out[..., 2 * half :] = normed[..., 2 * half :]
    return out
