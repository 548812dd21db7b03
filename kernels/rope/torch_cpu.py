"""Query/key norm and partial rotation, torch CPU path; `mrope_cos_sin` is for every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlm_serve.kernels.norms.torch_cpu import BLOCK, blocks, centred_factor, unit_rows


def mrope_cos_sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, sections: Sequence[int], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[0].float().unsqueeze(1) * inv_freq
    for axis in (1, 2):
        which = slice(axis, 3 * sections[axis], 3)
        angles[:, which] = positions[axis].float().unsqueeze(1) * inv_freq[which]
    if scale == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * scale, angles.sin() * scale


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
    factor = centred_factor(weight)
    if x.numel() <= BLOCK:
        return _rotate(unit_rows(x.float(), eps).mul_(factor), cos, sin).to(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype)
    for part in blocks(x):
        normed = unit_rows(x[part].float(), eps).mul_(factor)
        out[part] = _rotate(normed, cos[part], sin[part])
    return out


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first dims of each head in halves, in place."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1.0)
    second.mul_(cos).add_(turned)
    return x
