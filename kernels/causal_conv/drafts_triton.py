"""Causal depthwise convolution of drafted tokens on a GPU: one launch for all slices."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.causal_conv.triton import TAIL_TILE, arguments_of, sizes_of
from vlm_serve.kernels.metadata import VerifyMeta
from vlm_serve.kernels.triton_support import launch, verify_tables
from vlm_serve.kernels.triton_views import rows


@triton.jit
def _verify_kernel(conv, inputs, slices, SIZES: tl.constexpr):
    """Fold the inputs of updates into a tail, then convolve the tokens of the slice behind it."""
    x, tails, out = conv.x, conv.tails, conv.out
    slices += tl.program_id(0) * 5
    row = tl.load(slices).to(tl.int64)
    first = tl.load(slices + 1).to(tl.int64)
    folded = tl.load(slices + 2)
    begin = tl.load(slices + 3).to(tl.int64)
    channels = tl.program_id(1) * SIZES.tile + tl.arange(0, SIZES.tile)
    columns = tl.arange(0, SIZES.block)
    inside = channels < SIZES.channels
    tapped = inside[:, None] & (columns < SIZES.taps)[None, :]
    kept = inside[:, None] & (columns < SIZES.taps - 1)[None, :]
    tail = tails.at + row * tails.row
    tail += channels[:, None] * tails.channel + columns[None, :]
    if folded > 0:
        # Column c of the new tail is column c + folded of the old one and the inputs behind it.
        behind = folded + columns - (SIZES.taps - 1)
        shifted = tl.load(tail + folded, mask=kept & (behind < 0)[None, :], other=0.0)
        earlier = inputs.at + (first + behind)[None, :] * inputs.stride + channels[:, None]
        recent = tl.load(earlier, mask=kept & (behind >= 0)[None, :], other=0.0)
        shifted = tl.where((behind < 0)[None, :], shifted, recent)
        # Both are overwritten below: all threads must read before any writes.
        tl.debug_barrier()
        tl.store(tail, shifted, mask=kept)
    tl.debug_barrier()
    weights = conv.weight.at + channels[:, None] * conv.weight.stride + columns[None, :]
    factor = tl.load(weights, mask=tapped, other=0.0).to(tl.float32)
    for place in range(0, tl.load(slices + 4)):
        token = begin + place
        # The window ends with the token itself; what lies before the slice is in the tail.
        at = place + columns - (SIZES.taps - 1)
        old = tl.load(tail + place, mask=kept & (at < 0)[None, :], other=0.0)
        tokens = x.at + (begin + at)[None, :] * x.stride + channels[:, None]
        fresh = tl.load(tokens, mask=tapped & (at >= 0)[None, :], other=0.0)
        window = tl.where((at < 0)[None, :], old, fresh)
        total = tl.sum(window.to(tl.float32) * factor, axis=1)
        result = (total * tl.sigmoid(total)).to(out.dtype.element_ty)
        tl.store(out + token * SIZES.channels + channels, result, mask=inside)
        newest = tl.load(x.at + token * x.stride + channels, mask=inside, other=0.0)
        tl.store(inputs.at + (first + place) * inputs.stride + channels, newest, mask=inside)


def causal_conv_verify(
    x: torch.Tensor,
    weight: torch.Tensor,
    tails: torch.Tensor,
    inputs: torch.Tensor,
    meta: VerifyMeta,
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    arguments = {
        "conv": arguments_of(x, weight, tails, out),
        "inputs": rows(inputs),
        "slices": verify_tables(meta, x.device)["slices"],
        "SIZES": sizes_of(weight),
    }
    grid = (len(meta), triton.cdiv(len(weight), TAIL_TILE))
    launch(_verify_kernel, grid, arguments, num_warps=2)
    return out
