"""Causal depthwise convolution of drafted tokens on a GPU: one launch for all slices."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.causal_conv.triton import TAIL_TILE
from vlm_serve.kernels.metadata import VerifyMeta
from vlm_serve.kernels.triton_support import launch, power_of_two, verify_tables


@triton.jit
def _verify_kernel(
    x,
    weight,
    tails,
    inputs,
    out,
    slices,
    x_stride,
    weight_stride,
    tail_row_stride,
    tail_channel_stride,
    input_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
):
    """Fold the inputs of updates into a tail, then convolve the tokens of the slice behind it."""
    slices += tl.program_id(0) * 5
    row = tl.load(slices).to(tl.int64)
    first = tl.load(slices + 1).to(tl.int64)
    folded = tl.load(slices + 2)
    begin = tl.load(slices + 3).to(tl.int64)
    channels = tl.program_id(1) * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)
    columns = tl.arange(0, BLOCK_TAPS)
    inside = channels < CHANNELS
    tapped = inside[:, None] & (columns < TAPS)[None, :]
    kept = inside[:, None] & (columns < TAPS - 1)[None, :]
    tail = tails + row * tail_row_stride
    tail += channels[:, None] * tail_channel_stride + columns[None, :]
    if folded > 0:
        # Column c of the new tail is column c + folded of the old one and the inputs behind it.
        behind = folded + columns - (TAPS - 1)
        shifted = tl.load(tail + folded, mask=kept & (behind < 0)[None, :], other=0.0)
        earlier = inputs + (first + behind)[None, :] * input_stride + channels[:, None]
        recent = tl.load(earlier, mask=kept & (behind >= 0)[None, :], other=0.0)
        shifted = tl.where((behind < 0)[None, :], shifted, recent)
        # Both are overwritten below: all threads must read before any writes.
        tl.debug_barrier()
        tl.store(tail, shifted, mask=kept)
    tl.debug_barrier()
    weights = weight + channels[:, None] * weight_stride + columns[None, :]
    factor = tl.load(weights, mask=tapped, other=0.0).to(tl.float32)
    for place in range(0, tl.load(slices + 4)):
        token = begin + place
        # The window ends with the token itself; what lies before the slice is in the tail.
        at = place + columns - (TAPS - 1)
        old = tl.load(tail + place, mask=kept & (at < 0)[None, :], other=0.0)
        tokens = x + (begin + at)[None, :] * x_stride + channels[:, None]
        fresh = tl.load(tokens, mask=tapped & (at >= 0)[None, :], other=0.0)
        window = tl.where((at < 0)[None, :], old, fresh)
        total = tl.sum(window.to(tl.float32) * factor, axis=1)
        result = (total * tl.sigmoid(total)).to(out.dtype.element_ty)
        tl.store(out + token * CHANNELS + channels, result, mask=inside)
        newest = tl.load(x + token * x_stride + channels, mask=inside, other=0.0)
        tl.store(inputs + (first + place) * input_stride + channels, newest, mask=inside)


def causal_conv_verify(
    x: torch.Tensor,
    weight: torch.Tensor,
    tails: torch.Tensor,
    inputs: torch.Tensor,
    meta: VerifyMeta,
) -> torch.Tensor:
    channels, taps = weight.shape
    tables = verify_tables(meta, x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    arguments = {
        "x": x,
        "weight": weight,
        "tails": tails,
        "inputs": inputs,
        "out": out,
        "slices": tables["slices"],
        "x_stride": x.stride(0),
        "weight_stride": weight.stride(0),
        "tail_row_stride": tails.stride(0),
        "tail_channel_stride": tails.stride(1),
        "input_stride": inputs.stride(0),
        "CHANNELS": channels,
        "TAPS": taps,
        "BLOCK_TAPS": power_of_two(taps),
        "CHANNEL_TILE": TAIL_TILE,
    }
    grid = (len(meta), triton.cdiv(channels, TAIL_TILE))
    launch(_verify_kernel, grid, arguments, num_warps=2)
    return out
