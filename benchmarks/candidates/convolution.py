"""The causal convolution of a prefill with a whole chunk for a program.

A program waits for the tables and the weights of its channels once, not once every 16 tokens.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.causal_conv.triton import (
    CHANNEL_TILE,
    TOKEN_TILE,
    _silu,
    _unread_columns,
)
from vlm_serve.kernels.checks import MAX_CHUNK
from vlm_serve.kernels.metadata import PrefillMeta
from vlm_serve.kernels.triton_support import launch, prefill_tables


@triton.jit(do_not_specialize=["span"])
def _prefill_kernel(
    x,
    weight,
    tails,
    out,
    cu_seqlens,
    src_rows,
    chunk_bounds,
    chunk_sequence,
    x_stride,
    weight_stride,
    tail_row_stride,
    tail_channel_stride,
    span,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
):
    """Convolve some channels of up to `span` tokens of a chunk, a tile of tokens at a time."""
    programs = CHUNK // span
    chunk = tl.program_id(0) // programs
    first = tl.load(chunk_bounds + chunk) + (tl.program_id(0) % programs) * span
    end = tl.minimum(tl.load(chunk_bounds + chunk + 1), first + span)
    if first < end:
        sequence = tl.load(chunk_sequence + chunk)
        begin = tl.load(cu_seqlens + sequence)
        src = tl.load(src_rows + sequence).to(tl.int64)
        unread = _unread_columns(src, TAPS - 1)
        channels = tl.program_id(1) * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)
        known = channels < CHANNELS
        tail = tails + src * tail_row_stride + channels * tail_channel_stride
        taps = weight + channels * weight_stride
        for start in range(first, end, TOKEN_TILE):
            tokens = start + tl.arange(0, TOKEN_TILE)
            inside = (tokens < end)[:, None] & known[None, :]
            place = first.to(tl.int64) + (start - first)
            rows = x + (place - (TAPS - 1)) * x_stride
            total = tl.zeros((TOKEN_TILE, CHANNEL_TILE), tl.float32)
            for tap in tl.static_range(TAPS):
                source = tokens - (TAPS - 1) + tap
                fresh = inside & (source >= begin)[:, None]
                places = (tap + tl.arange(0, TOKEN_TILE))[:, None] * x_stride + channels[None, :]
                seen = tl.load(rows + places, mask=fresh, other=0.0).to(tl.float32)
                # Before the slice's first token come the TAPS - 1 columns of the old tail.
                if start - begin < TAPS - 1:
                    column = source - begin + TAPS - 1
                    old = inside & ((source < begin) & (column >= unread))[:, None]
                    kept = tl.load(tail[None, :] + column[:, None], mask=old, other=0.0)
                    seen += kept.to(tl.float32)
                factor = tl.load(taps + tap, mask=known, other=0.0).to(tl.float32)
                total += seen * factor[None, :]
            places = tl.arange(0, TOKEN_TILE)[:, None] * CHANNELS + channels[None, :]
            done = out + place * CHANNELS
            tl.store(done + places, _silu(total).to(out.dtype.element_ty), mask=inside)


def convolve(
    x: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor, meta: PrefillMeta, span: int
) -> torch.Tensor:
    """Return the outputs alone; the tails stay. `span` is 16, 32 or 64 tokens."""
    channels, taps = weight.shape
    tables = prefill_tables(meta, x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    chunks, tiles = tables["chunk_sequence"].shape[0], triton.cdiv(channels, CHANNEL_TILE)
    names = ("cu_seqlens", "src_rows", "chunk_bounds", "chunk_sequence")
    arguments = {
        "x": x,
        "weight": weight,
        "tails": tails,
        "out": out,
        **{name: tables[name] for name in names},
        "x_stride": x.stride(0),
        "weight_stride": weight.stride(0),
        "tail_row_stride": tails.stride(0),
        "tail_channel_stride": tails.stride(1),
        "span": span,
        "CHANNELS": channels,
        "TAPS": taps,
        "CHUNK": MAX_CHUNK,
        "TOKEN_TILE": TOKEN_TILE,
        "CHANNEL_TILE": CHANNEL_TILE,
    }
    launch(_prefill_kernel, (chunks * (MAX_CHUNK // span), tiles), arguments)
    return out
