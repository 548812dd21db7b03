"""Causal depthwise convolution on a GPU.

Prefill takes two launches: the first computes outputs and only reads tails; the second writes the
new ones. One launch could not do both. Source and destination may be the same row, and the program
at the end of a sequence does not wait for the one at its start.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.checks import MAX_CHUNK
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta
from vlm_serve.kernels.triton_support import decode_tables, launch, power_of_two, prefill_tables

TOKEN_TILE = 16
CHANNEL_TILE = 128
TAIL_TILE = 256


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _unread_columns(src, KEPT: tl.constexpr):
    """Return the number of leading columns of the old tail to skip: all of them for zero state."""
    return tl.where(src >= 0, 0, KEPT)


@triton.jit
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
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    TILES: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
):
    chunk = tl.program_id(0) // TILES
    first = tl.load(chunk_bounds + chunk) + (tl.program_id(0) % TILES) * TOKEN_TILE
    end = tl.load(chunk_bounds + chunk + 1)
    if first < end:
        sequence = tl.load(chunk_sequence + chunk)
        begin = tl.load(cu_seqlens + sequence)
        src = tl.load(src_rows + sequence).to(tl.int64)
        unread = _unread_columns(src, TAPS - 1)
        tokens = first + tl.arange(0, TOKEN_TILE)
        channels = tl.program_id(1) * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)
        inside = (tokens < end)[:, None] & (channels < CHANNELS)[None, :]
        tail = tails + src * tail_row_stride + channels * tail_channel_stride
        total = tl.zeros((TOKEN_TILE, CHANNEL_TILE), tl.float32)
        for tap in tl.static_range(TAPS):
            source = tokens - (TAPS - 1) + tap
            fresh = inside & (source >= begin)[:, None]
            places = source.to(tl.int64)[:, None] * x_stride + channels[None, :]
            seen = tl.load(x + places, mask=fresh, other=0.0).to(tl.float32)
            # Before the slice's first token come the TAPS - 1 columns of the old tail.
            if first - begin < TAPS - 1:
                column = source - begin + TAPS - 1
                old = inside & ((source < begin) & (column >= unread))[:, None]
                kept = tl.load(tail[None, :] + column[:, None], mask=old, other=0.0)
                seen += kept.to(tl.float32)
            factor = tl.load(
                weight + channels * weight_stride + tap, mask=channels < CHANNELS, other=0.0
            )
            total += seen * factor.to(tl.float32)[None, :]
        places = tokens.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
        tl.store(out + places, _silu(total).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _tail_kernel(
    x,
    tails,
    cu_seqlens,
    src_rows,
    tail_stop,
    tail_row,
    first_tail,
    x_stride,
    tail_row_stride,
    tail_channel_stride,
    CHANNELS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_KEPT: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
):
    """Write all tails of one sequence for some channels: snapshots, then the final one."""
    sequence = tl.program_id(0)
    begin = tl.load(cu_seqlens + sequence)
    src = tl.load(src_rows + sequence).to(tl.int64)
    channels = tl.program_id(1) * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)
    columns = tl.arange(0, BLOCK_KEPT)
    inside = (channels < CHANNELS)[:, None] & (columns < KEPT)[None, :]
    unread = _unread_columns(src, KEPT)
    channel_places = channels[:, None] * tail_channel_stride
    for entry in range(tl.load(first_tail + sequence), tl.load(first_tail + sequence + 1)):
        source = tl.load(tail_stop + entry) - KEPT + columns
        row = tl.load(tail_row + entry).to(tl.int64)
        fresh = inside & (source >= begin)[None, :]
        places = source.to(tl.int64)[None, :] * x_stride + channels[:, None]
        values = tl.load(x + places, mask=fresh, other=0.0)
        column = source - begin + KEPT
        old = inside & ((source < begin) & (column >= unread))[None, :]
        places = src * tail_row_stride + channel_places + column[None, :]
        kept = tl.load(tails + places, mask=old, other=0.0)
        values = tl.where((source >= begin)[None, :], values, kept)
        # The row may be the source: all threads must read before any writes.
        tl.debug_barrier()
        places = row * tail_row_stride + channel_places + columns[None, :]
        tl.store(tails + places, values, mask=inside)


def causal_conv_prefill(
    x: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor, meta: PrefillMeta
) -> torch.Tensor:
    channels, taps = weight.shape
    tables = prefill_tables(meta, x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tiles = MAX_CHUNK // TOKEN_TILE
    arguments = {
        "x": x,
        "weight": weight,
        "tails": tails,
        "out": out,
        "cu_seqlens": tables["cu_seqlens"],
        "src_rows": tables["src_rows"],
        "chunk_bounds": tables["chunk_bounds"],
        "chunk_sequence": tables["chunk_sequence"],
        "x_stride": x.stride(0),
        "weight_stride": weight.stride(0),
        "tail_row_stride": tails.stride(0),
        "tail_channel_stride": tails.stride(1),
        "CHANNELS": channels,
        "TAPS": taps,
        "TILES": tiles,
        "TOKEN_TILE": TOKEN_TILE,
        "CHANNEL_TILE": CHANNEL_TILE,
    }
    grid = (tables["chunk_sequence"].shape[0] * tiles, triton.cdiv(channels, CHANNEL_TILE))
    launch(_prefill_kernel, grid, arguments)
    arguments = {
        "x": x,
        "tails": tails,
        "cu_seqlens": tables["cu_seqlens"],
        "src_rows": tables["src_rows"],
        "tail_stop": tables["tail_stop"],
        "tail_row": tables["tail_row"],
        "first_tail": tables["first_tail"],
        "x_stride": x.stride(0),
        "tail_row_stride": tails.stride(0),
        "tail_channel_stride": tails.stride(1),
        "CHANNELS": channels,
        "KEPT": taps - 1,
        "BLOCK_KEPT": power_of_two(taps - 1),
        "CHANNEL_TILE": TAIL_TILE,
    }
    launch(_tail_kernel, (len(meta), triton.cdiv(channels, TAIL_TILE)), arguments)
    return out


@triton.jit
def convolve_token(
    sequence,
    tile,
    x,
    weight,
    tails,
    out,
    src_rows,
    dst_rows,
    snapshot_rows,
    x_stride,
    weight_stride,
    tail_row_stride,
    tail_channel_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
):
    """Convolve the new token of a sequence in a tile of channels, and shift its tail."""
    channels = tile * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)
    columns = tl.arange(0, BLOCK_TAPS)
    src = tl.load(src_rows + sequence).to(tl.int64)
    dst = tl.load(dst_rows + sequence).to(tl.int64)
    snapshot = tl.load(snapshot_rows + sequence).to(tl.int64)
    inside = channels < CHANNELS
    newest = tl.load(x + sequence.to(tl.int64) * x_stride + channels, mask=inside, other=0.0)
    channel_places = channels[:, None] * tail_channel_stride + columns[None, :]
    # The window is the old tail's TAPS - 1 columns and the new token in the last one.
    unread = _unread_columns(src, TAPS - 1)
    old = inside[:, None] & ((columns < TAPS - 1) & (columns >= unread))[None, :]
    window = tl.load(tails + src * tail_row_stride + channel_places, mask=old, other=0.0)
    window = tl.where((columns == TAPS - 1)[None, :], newest[:, None], window)
    tapped = inside[:, None] & (columns < TAPS)[None, :]
    places = channels[:, None] * weight_stride + columns[None, :]
    factor = tl.load(weight + places, mask=tapped, other=0.0)
    total = tl.sum(window.to(tl.float32) * factor.to(tl.float32), axis=1)
    places = sequence.to(tl.int64) * CHANNELS + channels
    tl.store(out + places, _silu(total).to(out.dtype.element_ty), mask=inside)
    # Shift by one column. The row may be the source: all threads must read before any writes.
    tl.debug_barrier()
    shifted = tapped & (columns > 0)[None, :]
    tl.store(tails + dst * tail_row_stride + channel_places - 1, window, mask=shifted)
    if snapshot >= 0:
        tl.store(tails + snapshot * tail_row_stride + channel_places - 1, window, mask=shifted)


@triton.jit
def _decode_kernel(
    x,
    weight,
    tails,
    out,
    src_rows,
    dst_rows,
    snapshot_rows,
    x_stride,
    weight_stride,
    tail_row_stride,
    tail_channel_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
):
    convolve_token(
        tl.program_id(0),
        tl.program_id(1),
        x,
        weight,
        tails,
        out,
        src_rows,
        dst_rows,
        snapshot_rows,
        x_stride,
        weight_stride,
        tail_row_stride,
        tail_channel_stride,
        CHANNELS,
        TAPS,
        BLOCK_TAPS,
        CHANNEL_TILE,
    )


def causal_conv_decode(
    x: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor, meta: DecodeMeta
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (x.shape[0], triton.cdiv(x.shape[1], TAIL_TILE))
    launch(_decode_kernel, grid, token_arguments(x, weight, tails, meta, out), num_warps=2)
    return out


def token_arguments(
    x: torch.Tensor,
    weight: torch.Tensor,
    tails: torch.Tensor,
    meta: DecodeMeta,
    out: torch.Tensor,
) -> dict[str, Any]:
    """Return the arguments of `convolve_token`, by parameter name."""
    channels, taps = weight.shape
    tables = decode_tables(meta, x.device)
    return {
        "x": x,
        "weight": weight,
        "tails": tails,
        "out": out,
        "src_rows": tables["src_rows"],
        "dst_rows": tables["dst_rows"],
        "snapshot_rows": tables["snapshot_rows"],
        "x_stride": x.stride(0),
        "weight_stride": weight.stride(0),
        "tail_row_stride": tails.stride(0),
        "tail_channel_stride": tails.stride(1),
        "CHANNELS": channels,
        "TAPS": taps,
        "BLOCK_TAPS": power_of_two(taps),
        "CHANNEL_TILE": TAIL_TILE,
    }
