"""Query/key norm and partial rotation by torch; `mrope_cos_sin` is for every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vlm_serve.kernels.norms.reference import centred
from vlm_serve.kernels.plain import widened


class Rotation(NamedTuple):
    """What norms and rotates the heads of tokens.

    Attributes:
        q_weight, k_weight: `[D]` norm weights; 0 means a factor of 1. None: heads have no norm.
        cos, sin: float32 `[T, rot / 2]` from `mrope_cos_sin`, `rot <= D`.
        eps: added to the mean square.
    """

    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    eps: float


def frequencies_of(axis: int, sections: Sequence[int], interleaved: bool) -> slice:
    """Return the frequencies that use the height position, axis 1, or the width position, 2."""
    if interleaved:
        return slice(axis, 3 * sections[axis], 3)
    return slice(sum(sections[:axis]), sum(sections[: axis + 1]))


def mrope_cos_sin(
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    sections: Sequence[int],
    scale: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[0].float().unsqueeze(1) * inv_freq
    for axis in (1, 2):
        which = frequencies_of(axis, sections, interleaved)
        angles[:, which] = positions[axis].float().unsqueeze(1) * inv_freq[which]
    if scale == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * scale, angles.sin() * scale


def qk_norm_rope(
    q: torch.Tensor, k: torch.Tensor, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    q_weight, k_weight, cos, sin, eps = rotation
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return norm_rope(q, q_weight, cos, sin, eps), norm_rope(k, k_weight, cos, sin, eps)


def norm_rope(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """Normalise x `[T, H, D]` and rotate the first dims of each head in halves, by angles of `[T,
    1, rot / 2]`."""
    half = cos.shape[-1]
    normed = widened(x) if weight is None else centred(x, weight, eps)
    first, second = normed[..., :half], normed[..., half : 2 * half]
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat([*turned, normed[..., 2 * half :]], -1).to(x.dtype)
