"""Rotation of whole heads in halves on a GPU, in one launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.triton_support import launch, power_of_two


@triton.jit
def _halves_kernel(
    x,
    turns,
    out,
    token_stride,
    part_stride,
    sines,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotate the queries or the keys of a token."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads, pairs = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_HALF)
    mask = (heads < HEADS)[:, None] & (pairs < HALF)[None, :]
    places = heads[:, None] * (2 * HALF) + pairs[None, :]
    own = x + token * token_stride + part * part_stride
    first = tl.load(own + places, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(own + HALF + places, mask=mask, other=0.0).to(tl.float32)
    angle = turns + token * HALF + pairs
    cos = tl.load(angle, mask=pairs < HALF, other=0.0)[None, :]
    sin = tl.load(angle + sines, mask=pairs < HALF, other=0.0)[None, :]
    target = out + (token * 2 + part) * (HEADS * 2 * HALF)
    dtype = out.dtype.element_ty
    tl.store(target + places, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(target + HALF + places, (second * cos + first * sin).to(dtype), mask=mask)


def rotate_halves(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    tokens, _, heads, dim = x.shape
    if x.stride(3) != 1 or x.stride(2) != dim:
        x = x.contiguous()
    if turns.stride(1) != dim // 2 or turns.stride(2) != 1:
        turns = turns.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    arguments = {
        "x": x,
        "turns": turns,
        "out": out,
        "token_stride": x.stride(0),
        "part_stride": x.stride(1),
        "sines": turns.stride(0),
        "HEADS": heads,
        "HALF": dim // 2,
        "BLOCK_HEADS": power_of_two(heads),
        "BLOCK_HALF": power_of_two(dim // 2),
    }
    # Products and sums are rounded apart, as by operations of their own.
    launch(_halves_kernel, (tokens, 2), arguments, num_warps=4, fuse=False)
    return out
