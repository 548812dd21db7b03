"""Prefill of Mamba2 on a GPU, and the lengths of its steps.

Inside a chunk with incoming state S, cumulative log decay G and values x scaled by their steps'
lengths, the outputs and the state after it are three products (Dao, Gu 2024, section 6):

    O  = diag(exp G) C S + (C B^T * decay) x + skip * v
    S' = exp(G_last) S + (diag(exp(G_last - G)) B)^T x

The state of one (sequence, head, tile of value columns) stays in registers from the source row to
the destination row, and a snapshot is one more store of it. Programs of other tiles compute C B^T
again: heads have 64 columns, so that costs less than its memory would.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.checks import MAX_CHUNK
from vlm_serve.kernels.gated_delta.reference import Tokens
from vlm_serve.kernels.gated_delta.step_triton import sizes_of, softplus, views
from vlm_serve.kernels.metadata import PrefillMeta
from vlm_serve.kernels.triton_support import current_target, launch, power_of_two
from vlm_serve.kernels.triton_views import dots, rows, slices

_CHUNK = tl.constexpr(MAX_CHUNK)


@triton.jit
def _mamba2_kernel(
    tokens, state, out, slices, SIZES: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr
):
    sequence = tl.program_id(2)
    head = tl.program_id(1)
    PRECISION: tl.constexpr = DOT.precision
    dims = tl.arange(0, SIZES.block_key)
    columns = tl.program_id(0) * SIZES.columns + tl.arange(0, SIZES.columns)
    index = tl.arange(0, _CHUNK)
    inside_dims, inside_columns = dims < SIZES.key_dim, columns < SIZES.value_dim
    tile_inside = inside_dims[:, None] & inside_columns[None, :]
    tile = head * SIZES.key_dim * SIZES.value_dim
    tile = tile + dims[:, None] * SIZES.value_dim + columns[None, :]
    q = tokens.q.at + (head // SIZES.ratio) * tokens.q.head
    k = tokens.k.at + (head // SIZES.ratio) * tokens.k.head
    v = tokens.v.at + head * tokens.v.head
    skip = tl.load(tokens.skip + head)
    visible = index[:, None] >= index[None, :]

    current = tl.zeros((SIZES.block_key, SIZES.columns), tl.float32)
    src = tl.load(slices.src_rows + sequence).to(tl.int64)
    if src >= 0:
        stored = tl.load(state.at + src * state.stride + tile, mask=tile_inside, other=0.0)
        current = stored.to(tl.float32)
    first = tl.load(slices.first_chunk + sequence)
    for chunk in range(first, tl.load(slices.first_chunk + sequence + 1)):
        begin = tl.load(slices.chunk_bounds + chunk).to(tl.int64)
        end = tl.load(slices.chunk_bounds + chunk + 1).to(tl.int64)
        token = begin + index
        inside = token < end
        decays = tl.load(tokens.g.at + token * tokens.g.stride + head, mask=inside, other=0.0)
        total = tl.cumsum(decays, axis=0)
        last = tl.sum(tl.where(token == end - 1, total, 0.0), axis=0)
        # In tiles of dims, and read again below: whole rows of both would be live at once.
        scores = tl.zeros((_CHUNK, _CHUNK), tl.float32)
        for start in range(0, SIZES.block_key, TILE):
            some = start + tl.arange(0, TILE)
            own = inside[:, None] & (some < SIZES.key_dim)[None, :]
            queries = tl.load(
                q + token[:, None] * tokens.q.token + some[None, :], mask=own, other=0.0
            )
            keys = tl.load(k + token[:, None] * tokens.k.token + some[None, :], mask=own, other=0.0)
            turned = tl.trans(keys.to(DOT.dtype))
            scores = tl.dot(queries.to(DOT.dtype), turned, scores, input_precision=PRECISION)
        # Only j <= i is ever used; above the diagonal the difference may overflow exp.
        decay = tl.exp(tl.where(visible, total[:, None] - total[None, :], 0.0))
        seen = tl.where(visible, scores * decay, 0.0).to(DOT.dtype)
        places = token[:, None] * tokens.q.token + dims[None, :]
        queries = tl.load(q + places, mask=inside[:, None] & inside_dims[None, :], other=0.0)
        queries = queries.to(DOT.dtype)
        result = tl.dot(queries, current.to(DOT.dtype), input_precision=PRECISION)
        result *= tl.exp(total)[:, None]

        inside_values = inside[:, None] & inside_columns[None, :]
        places = token[:, None] * tokens.v.token + columns[None, :]
        values = tl.load(v + places, mask=inside_values, other=0.0).to(tl.float32)
        places = token * tokens.beta.stride + head
        lengths = tl.load(tokens.beta.at + places, mask=inside, other=0.0).to(tl.float32)
        scaled = values * lengths[:, None]
        result = tl.dot(seen, scaled.to(DOT.dtype), result, input_precision=PRECISION)
        result += values * skip
        places = (token[:, None] * SIZES.heads + head) * SIZES.value_dim + columns[None, :]
        tl.store(out + places, result.to(out.dtype.element_ty), mask=inside_values)

        added = (scaled * tl.exp(last - total)[:, None]).to(DOT.dtype)
        current *= tl.exp(last)
        places = token[None, :] * tokens.k.token + dims[:, None]
        keys = tl.load(k + places, mask=inside[None, :] & inside_dims[:, None], other=0.0)
        keys = keys.to(DOT.dtype)
        current = tl.dot(keys, added, current, input_precision=PRECISION)
        # A resumed run reads the rounded state from the pool, so an unsplit one must round it too.
        rounded = current.to(state.at.dtype.element_ty)
        current = rounded.to(tl.float32)
        snapshot = tl.load(slices.chunk_snapshot + chunk).to(tl.int64)
        if snapshot >= 0:
            tl.store(state.at + snapshot * state.stride + tile, rounded, mask=tile_inside)
    dst = tl.load(slices.dst_rows + sequence).to(tl.int64)
    places = dst * state.stride + tile
    tl.store(state.at + places, current.to(state.at.dtype.element_ty), mask=tile_inside)


def chunk_mamba2(tokens: Tokens, state: torch.Tensor, meta: PrefillMeta) -> torch.Tensor:
    """Prefill as `chunk_gated_delta` does."""
    q, v = tokens.q, tokens.v
    count, value_dim = v.shape[1:]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    # The tile's shape depends on the types alone, so that a sequence's bits do not depend on the
    # batch. float32 operands take three times the registers.
    columns = 16 if q.dtype == torch.float32 else 32
    arguments = {
        "tokens": views(tokens),
        "state": rows(state),
        "out": out,
        "slices": slices(meta, q.device),
        "SIZES": sizes_of(tokens, columns, 32),
        "TILE": 32,
        "DOT": dots(q.dtype),
    }
    grid = (triton.cdiv(value_dim, columns), count, len(meta))
    # A warp of CDNA has 64 threads: with four of them each may hold twice as many values.
    launch(_mamba2_kernel, grid, arguments, num_warps=4 if current_target().backend == "hip" else 8)
    return out


@triton.jit
def _lengths_kernel(
    raw, neg_decay, dt_bias, lengths, decay, low, high, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK)
    inside = heads < HEADS
    x = tl.load(raw.at + row * raw.stride + heads, mask=inside, other=0.0).to(tl.float32)
    x = softplus(x + tl.load(dt_bias + heads, mask=inside, other=0.0))
    x = tl.minimum(tl.maximum(x, low), high)
    factor = tl.load(neg_decay + heads, mask=inside, other=0.0)
    tl.store(lengths + row * HEADS + heads, x, mask=inside)
    tl.store(decay + row * HEADS + heads, factor * x, mask=inside)


def step_lengths(
    raw: torch.Tensor, neg_decay: torch.Tensor, dt_bias: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    count = len(neg_decay)
    lengths, decay = torch.empty(2, len(raw), count, device=raw.device)
    arguments = {
        "raw": rows(raw),
        "neg_decay": neg_decay,
        "dt_bias": dt_bias,
        "lengths": lengths,
        "decay": decay,
        "low": low,
        "high": high,
        "HEADS": count,
        "BLOCK": power_of_two(count),
    }
    launch(_lengths_kernel, (len(raw),), arguments, num_warps=1)
    return lengths, decay
