"""Causal depthwise convolution on a GPU.

Prefill takes two launches: the first computes outputs and only reads tails; the second writes the
new ones. One launch could not do both. Source and destination may be the same row, and the program
at the end of a sequence does not wait for the one at its start. Drafted tokens take one launch for
all slices.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.causal_conv.reference import SILU, Behind
from vlm_serve.kernels.checks import MAX_CHUNK
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta, VerifyMeta
from vlm_serve.kernels.triton_support import launch, power_of_two, verify_tables
from vlm_serve.kernels.triton_views import Rows, constants, moves, rows, slices

TOKEN_TILE = 16
CHANNEL_TILE = 128
TAIL_TILE = 256
_TILES = tl.constexpr(MAX_CHUNK // TOKEN_TILE)
_TOKENS = tl.constexpr(TOKEN_TILE)


class Tails(NamedTuple):
    """The pool of tails with the strides of its rows and of its channels."""

    at: torch.Tensor
    row: int
    channel: int


class Convolution(NamedTuple):
    """Arguments of a convolution's kernels. Without a bias, its place is never read."""

    x: Rows
    weight: Rows
    bias: torch.Tensor
    tails: Tails
    out: torch.Tensor


class ConvSizes(NamedTuple):
    """Constants: channels and taps, the columns of a window, the channels of a program, and what
    follows the sum."""

    channels: int
    taps: int
    block: int
    tile: int
    biased: int
    silu: int


def arguments_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    tails: torch.Tensor,
    out: torch.Tensor,
    behind: Behind = SILU,
) -> Convolution:
    """Return what the kernels read and write as one argument."""
    pool = Tails(tails, tails.stride(0), tails.stride(1))
    return Convolution(
        rows(x), rows(weight), weight if behind.bias is None else behind.bias, pool, out
    )


def sizes_of(
    weight: torch.Tensor, tile: int = TAIL_TILE, kept: bool = False, behind: Behind = SILU
) -> ConvSizes:
    """Return the constants; a window of all taps, or `kept`: of the tail's columns."""
    channels, taps = weight.shape
    what = int(behind.bias is not None), int(behind.silu)
    return constants(ConvSizes, channels, taps, power_of_two(taps - kept), tile, *what)


@triton.jit
def _behind(total, bias, channels, SIZES: tl.constexpr):
    """Apply what follows the sums `[..., channels]` of some channels."""
    if SIZES.biased:
        total += tl.load(bias + channels, mask=channels < SIZES.channels, other=0.0).to(tl.float32)
    if SIZES.silu:
        total *= tl.sigmoid(total)
    return total


@triton.jit
def _unread_columns(src, KEPT: tl.constexpr):
    """Return the number of leading columns of the old tail to skip: all of them for zero state."""
    return tl.where(src >= 0, 0, KEPT)


@triton.jit
def _prefill_kernel(conv, slices, SIZES: tl.constexpr):
    x, tails = conv.x, conv.tails
    chunk = tl.program_id(0) // _TILES
    first = tl.load(slices.chunk_bounds + chunk) + (tl.program_id(0) % _TILES) * _TOKENS
    end = tl.load(slices.chunk_bounds + chunk + 1)
    if first < end:
        sequence = tl.load(slices.chunk_sequence + chunk)
        begin = tl.load(slices.cu_seqlens + sequence)
        src = tl.load(slices.src_rows + sequence).to(tl.int64)
        unread = _unread_columns(src, SIZES.taps - 1)
        tokens = first + tl.arange(0, _TOKENS)
        channels = tl.program_id(1) * SIZES.tile + tl.arange(0, SIZES.tile)
        inside = (tokens < end)[:, None] & (channels < SIZES.channels)[None, :]
        tail = tails.at + src * tails.row + channels * tails.channel
        total = tl.zeros((_TOKENS, SIZES.tile), tl.float32)
        for tap in tl.static_range(SIZES.taps):
            source = tokens - (SIZES.taps - 1) + tap
            fresh = inside & (source >= begin)[:, None]
            places = source.to(tl.int64)[:, None] * x.stride + channels[None, :]
            seen = tl.load(x.at + places, mask=fresh, other=0.0).to(tl.float32)
            # Before the slice's first token come the TAPS - 1 columns of the old tail.
            if first - begin < SIZES.taps - 1:
                column = source - begin + SIZES.taps - 1
                old = inside & ((source < begin) & (column >= unread))[:, None]
                kept = tl.load(tail[None, :] + column[:, None], mask=old, other=0.0)
                seen += kept.to(tl.float32)
            weights = conv.weight.at + channels * conv.weight.stride + tap
            factor = tl.load(weights, mask=channels < SIZES.channels, other=0.0)
            total += seen * factor.to(tl.float32)[None, :]
        places = tokens.to(tl.int64)[:, None] * SIZES.channels + channels[None, :]
        total = _behind(total, conv.bias, channels, SIZES)
        tl.store(conv.out + places, total.to(conv.out.dtype.element_ty), mask=inside)


@triton.jit
def _tail_kernel(conv, slices, SIZES: tl.constexpr):
    """Write all tails of one sequence for some channels: snapshots, then the final one."""
    x, tails = conv.x, conv.tails
    KEPT: tl.constexpr = SIZES.taps - 1
    sequence = tl.program_id(0)
    begin = tl.load(slices.cu_seqlens + sequence)
    src = tl.load(slices.src_rows + sequence).to(tl.int64)
    channels = tl.program_id(1) * SIZES.tile + tl.arange(0, SIZES.tile)
    columns = tl.arange(0, SIZES.block)
    inside = (channels < SIZES.channels)[:, None] & (columns < KEPT)[None, :]
    unread = _unread_columns(src, KEPT)
    channel_places = channels[:, None] * tails.channel
    first_tail = slices.first_tail + sequence
    for entry in range(tl.load(first_tail), tl.load(first_tail + 1)):
        source = tl.load(slices.tail_stop + entry) - KEPT + columns
        row = tl.load(slices.tail_row + entry).to(tl.int64)
        fresh = inside & (source >= begin)[None, :]
        places = source.to(tl.int64)[None, :] * x.stride + channels[:, None]
        values = tl.load(x.at + places, mask=fresh, other=0.0)
        column = source - begin + KEPT
        old = inside & ((source < begin) & (column >= unread))[None, :]
        places = src * tails.row + channel_places + column[None, :]
        kept = tl.load(tails.at + places, mask=old, other=0.0)
        values = tl.where((source >= begin)[None, :], values, kept)
        # The row may be the source: all threads must read before any writes.
        tl.debug_barrier()
        places = row * tails.row + channel_places + columns[None, :]
        tl.store(tails.at + places, values, mask=inside)


def causal_conv_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    tails: torch.Tensor,
    meta: PrefillMeta,
    behind: Behind,
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tables, channels = slices(meta, x.device), len(weight)
    shared = {"conv": arguments_of(x, weight, tails, out, behind), "slices": tables}
    tiles = MAX_CHUNK // TOKEN_TILE
    grid = (tables.chunk_sequence.shape[0] * tiles, triton.cdiv(channels, CHANNEL_TILE))
    launch(
        _prefill_kernel, grid, {**shared, "SIZES": sizes_of(weight, CHANNEL_TILE, behind=behind)}
    )
    grid = (len(meta), triton.cdiv(channels, TAIL_TILE))
    launch(_tail_kernel, grid, {**shared, "SIZES": sizes_of(weight, kept=True)})
    return out


@triton.jit
def convolve_token(sequence, tile, conv, moves, SIZES: tl.constexpr):
    """Convolve the new token of a sequence in a tile of channels, and shift its tail."""
    tails = conv.tails
    channels = tile * SIZES.tile + tl.arange(0, SIZES.tile)
    columns = tl.arange(0, SIZES.block)
    src = tl.load(moves.src + sequence).to(tl.int64)
    dst = tl.load(moves.dst + sequence).to(tl.int64)
    snapshot = tl.load(moves.snapshot + sequence).to(tl.int64)
    inside = channels < SIZES.channels
    own = conv.x.at + sequence.to(tl.int64) * conv.x.stride + channels
    newest = tl.load(own, mask=inside, other=0.0)
    channel_places = channels[:, None] * tails.channel + columns[None, :]
    # The window is the old tail's TAPS - 1 columns and the new token in the last one.
    LAST: tl.constexpr = SIZES.taps - 1
    unread = _unread_columns(src, LAST)
    old = inside[:, None] & ((columns < LAST) & (columns >= unread))[None, :]
    window = tl.load(tails.at + src * tails.row + channel_places, mask=old, other=0.0)
    window = tl.where((columns == LAST)[None, :], newest[:, None], window)
    tapped = inside[:, None] & (columns < SIZES.taps)[None, :]
    places = channels[:, None] * conv.weight.stride + columns[None, :]
    factor = tl.load(conv.weight.at + places, mask=tapped, other=0.0)
    total = tl.sum(window.to(tl.float32) * factor.to(tl.float32), axis=1)
    places = sequence.to(tl.int64) * SIZES.channels + channels
    total = _behind(total, conv.bias, channels, SIZES)
    tl.store(conv.out + places, total.to(conv.out.dtype.element_ty), mask=inside)
    # Shift by one column. The row may be the source: all threads must read before any writes.
    tl.debug_barrier()
    shifted = tapped & (columns > 0)[None, :]
    tl.store(tails.at + dst * tails.row + channel_places - 1, window, mask=shifted)
    if snapshot >= 0:
        tl.store(tails.at + snapshot * tails.row + channel_places - 1, window, mask=shifted)


@triton.jit
def _decode_kernel(conv, moves, SIZES: tl.constexpr):
    convolve_token(tl.program_id(0), tl.program_id(1), conv, moves, SIZES)


def causal_conv_decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    tails: torch.Tensor,
    meta: DecodeMeta,
    behind: Behind,
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (x.shape[0], triton.cdiv(x.shape[1], TAIL_TILE))
    arguments = {
        "conv": arguments_of(x, weight, tails, out, behind),
        "moves": moves(meta, x.device),
        "SIZES": sizes_of(weight, behind=behind),
    }
    launch(_decode_kernel, grid, arguments, num_warps=2)
    return out


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
        result = _behind(total, conv.bias, channels, SIZES).to(out.dtype.element_ty)
        tl.store(out + token * SIZES.channels + channels, result, mask=inside)
        newest = tl.load(x.at + token * x.stride + channels, mask=inside, other=0.0)
        tl.store(inputs.at + (first + place) * inputs.stride + channels, newest, mask=inside)


def causal_conv_verify(
    x: torch.Tensor,
    weight: torch.Tensor,
    tails: torch.Tensor,
    inputs: torch.Tensor,
    meta: VerifyMeta,
    behind: Behind,
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    arguments = {
        "conv": arguments_of(x, weight, tails, out, behind),
        "inputs": rows(inputs),
        "slices": verify_tables(meta, x.device)["slices"],
        "SIZES": sizes_of(weight, behind=behind),
    }
    grid = (len(meta), triton.cdiv(len(weight), TAIL_TILE))
    launch(_verify_kernel, grid, arguments, num_warps=2)
    return out
