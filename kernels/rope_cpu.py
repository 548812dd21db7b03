"""Query/key norm and partial rotation, torch CPU path."""

from __future__ import annotations

import torch

from vlm_serve.kernels import rope_compiled
from vlm_serve.kernels.dispatch import compiled_wanted
from vlm_serve.kernels.norms_cpu import BLOCK, blocks, centred_factor, unit_rows


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    if compiled_wanted() and rope_compiled.knows(q) and rope_compiled.knows(k):
        cos, sin = cos.contiguous(), sin.contiguous()
        turned = rope_compiled.norm_rope(q, q_weight, cos, sin, eps)
        return turned, rope_compiled.norm_rope(k, k_weight, cos, sin, eps)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _norm_rotate(q, q_weight, cos, sin, eps), _norm_rotate(k, k_weight, cos, sin, eps)


def _norm_rotate(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    factor = centred_factor(weight)
    if x.numel() <= BLOCK:
        return _rotate(unit_rows(x.float(), eps).mul_(factor), cos, sin).to(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype)
    for part in blocks(x):
        normed = unit_rows(x[part].float(), eps).mul_(factor)
        out[part] = _rotate(normed, cos[part], sin[part])
    return out


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the first dims of each head in halves, in place."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1.0)
    second.mul_(cos).add_(turned)
    return x
