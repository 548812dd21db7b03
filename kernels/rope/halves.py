"""Rotation of whole heads in halves by given angles, in float32, as vision towers have it."""

from __future__ import annotations

import torch

from vlm_serve.kernels.checks import FLOAT_DTYPES, check_tensor
from vlm_serve.kernels.dispatch import Op


def _by_torch(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    cos, sin = turns[:, :, None, None]
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)


_rotate = Op(_by_torch, triton="vlm_serve.kernels.rope.halves_triton:rotate_halves")


def rotate_halves(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotate queries and keys, every head by its token's angles.

    Args:
        x: `[T, 2, H, D]`, float32, bfloat16 or float16; heads are dense, one behind the other.
        turns: float32 `[2, T, D / 2]`, cosines and sines.

    Returns:
        A new tensor of the shape and dtype of x, contiguous on a GPU.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    tokens, _, _, dim = x.shape
    check_tensor("x", x, (tokens, 2, None, dim), FLOAT_DTYPES, turns.device)
    check_tensor("turns", turns, (2, tokens, dim // 2), (torch.float32,), x.device)
    return _rotate(x.device, x, turns)
