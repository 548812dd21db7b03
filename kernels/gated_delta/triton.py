"""Gated delta rule on a GPU: the sequential pass over chunks, and the decode step.

The state of one (sequence, value head, tile of value columns) stays in registers from the source
row to the destination row: `Dk x 32` float32, 32 registers per thread at Dk = 128. The same pass
makes the outputs, and a snapshot is one more store of the tile. So memory holds no per-chunk
states, and between chunks the state never leaves the program.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.checks import MAX_CHUNK
from vlm_serve.kernels.gated_delta.chunk_triton import prepare_chunks
from vlm_serve.kernels.gated_delta.step_triton import (
    STEP_COLUMNS,
    advance,
    sizes_of,
    step_arguments,
    views,
)
from vlm_serve.kernels.gated_delta.tokens import Tokens
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta
from vlm_serve.kernels.triton_support import current_target, launch, needs_other_form
from vlm_serve.kernels.triton_views import dots, moves, rows, slices

_CHUNK = tl.constexpr(MAX_CHUNK)


@triton.jit
def _scan_kernel(tokens, made, state, out, slices, SIZES: tl.constexpr, DOT: tl.constexpr):
    sequence = tl.program_id(2)
    head = tl.program_id(1)
    PRECISION: tl.constexpr = DOT.precision
    dims = tl.arange(0, SIZES.block_key)
    columns = tl.program_id(0) * SIZES.columns + tl.arange(0, SIZES.columns)
    index = tl.arange(0, _CHUNK)
    tile_inside = (dims < SIZES.key_dim)[:, None] & (columns < SIZES.value_dim)[None, :]
    tile = head * SIZES.key_dim * SIZES.value_dim
    tile = tile + dims[:, None] * SIZES.value_dim + columns[None, :]
    q = tokens.q.at + (head // SIZES.ratio) * tokens.q.head
    k = tokens.k.at + (head // SIZES.ratio) * tokens.k.head

    current = tl.zeros((SIZES.block_key, SIZES.columns), tl.float32)
    src = tl.load(slices.src_rows + sequence).to(tl.int64)
    if src >= 0:
        stored = tl.load(state.at + src * state.stride + tile, mask=tile_inside, other=0.0)
        current = stored.to(tl.float32)
    first = tl.load(slices.first_chunk + sequence)
    attention = made.attention + (first * SIZES.heads + head).to(tl.int64) * _CHUNK * _CHUNK
    for chunk in range(first, tl.load(slices.first_chunk + sequence + 1)):
        begin = tl.load(slices.chunk_bounds + chunk).to(tl.int64)
        token = begin + index
        inside = token < tl.load(slices.chunk_bounds + chunk + 1)
        inside_keys = inside[:, None] & (dims < SIZES.key_dim)[None, :]
        inside_values = inside[:, None] & (columns < SIZES.value_dim)[None, :]
        rows = token * SIZES.heads + head

        operand = current.to(DOT.dtype)
        places = rows[:, None] * SIZES.key_dim + dims[None, :]
        reads = tl.load(made.w + places, mask=inside_keys, other=0.0).to(DOT.dtype)
        places = rows[:, None] * SIZES.value_dim + columns[None, :]
        new = tl.load(made.u + places, mask=inside_values, other=0.0).to(tl.float32)
        new -= tl.dot(reads, operand, input_precision=PRECISION)

        keys = tl.load(
            k + token[None, :] * tokens.k.token + dims[:, None],
            mask=inside[None, :] & (dims < SIZES.key_dim)[:, None],
            other=0.0,
        )
        factor = tl.load(made.k_factor + rows, mask=inside, other=0.0)
        added = (new * factor[:, None]).to(DOT.dtype)
        current *= tl.load(made.chunk_factor + chunk * SIZES.heads + head)
        current = tl.dot(keys.to(DOT.dtype), added, current, input_precision=PRECISION)

        queries = tl.load(
            q + token[:, None] * tokens.q.token + dims[None, :], mask=inside_keys, other=0.0
        )
        factor = tl.load(made.q_factor + rows, mask=inside, other=0.0)
        result = tl.dot(queries.to(DOT.dtype), operand, input_precision=PRECISION) * factor[:, None]
        square = (chunk - first).to(tl.int64) * SIZES.heads * _CHUNK * _CHUNK
        square = square + index[:, None] * _CHUNK
        scores = tl.load(attention + square + index[None, :])
        result = tl.dot(scores.to(DOT.dtype), new.to(DOT.dtype), result, input_precision=PRECISION)
        tl.store(out + places, result.to(out.dtype.element_ty), mask=inside_values)

        # A resumed run reads the rounded state from the pool, so an unsplit one must round it too.
        rounded = current.to(state.at.dtype.element_ty)
        current = rounded.to(tl.float32)
        snapshot = tl.load(slices.chunk_snapshot + chunk).to(tl.int64)
        if snapshot >= 0:
            tl.store(state.at + snapshot * state.stride + tile, rounded, mask=tile_inside)
    dst = tl.load(slices.dst_rows + sequence).to(tl.int64)
    places = dst * state.stride + tile
    tl.store(state.at + places, current.to(state.at.dtype.element_ty), mask=tile_inside)


def chunk_gated_delta(tokens: Tokens, state: torch.Tensor, meta: PrefillMeta) -> torch.Tensor:
    q, v = tokens.q, tokens.v
    count, value_dim = v.shape[1:]
    made = prepare_chunks(tokens, meta)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    target = current_target()
    # float32 operands take three times the registers (see `Target.dot_precision`). The tile's shape
    # depends on nothing else, so that a sequence's bits do not depend on the batch.
    wide = q.dtype == torch.float32
    narrow = not wide and needs_other_form("chunk_gated_delta", target)
    columns = 16 if wide or narrow else 32
    arguments = {
        "tokens": views(tokens),
        "made": made,
        "state": rows(state),
        "out": out,
        "slices": slices(meta, q.device),
        "SIZES": sizes_of(tokens, columns, 16),
        "DOT": dots(q.dtype),
    }
    grid = (triton.cdiv(value_dim, columns), count, len(meta))
    # One stage: with two, Triton 3.6 gave wrong outputs on an H100 (errors of a tenth, with right
    # states), and on CDNA a second stage does not fit in the 64 KiB of LDS. Eight warps where
    # products take both operands from registers, which four warps spill.
    from_registers = target.backend == "cuda" and not target.roomy
    warps = 2 if narrow else 8 if wide or from_registers else 4
    launch(_scan_kernel, grid, arguments, num_warps=warps)
    return out


@triton.jit
def _step_kernel(tokens, state, out, moves, scale, SIZES: tl.constexpr):
    sequence = tl.program_id(2)
    head = tl.program_id(1)
    columns = tl.program_id(0) * SIZES.columns + tl.arange(0, SIZES.columns)
    result = advance(sequence, head, columns, tokens, state, moves, scale, SIZES)
    places = (sequence.to(tl.int64) * SIZES.heads + head) * SIZES.value_dim + columns
    tl.store(out + places, result.to(out.dtype.element_ty), mask=columns < SIZES.value_dim)


def recurrent_gated_delta(tokens: Tokens, state: torch.Tensor, meta: DecodeMeta) -> torch.Tensor:
    v = tokens.v
    batch, count, value_dim = v.shape
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    arguments = {
        **step_arguments(tokens, state, out),
        "moves": moves(meta, v.device),
        "SIZES": sizes_of(tokens),
    }
    grid = (triton.cdiv(value_dim, STEP_COLUMNS), count, batch)
    launch(_step_kernel, grid, arguments, num_warps=4)
    return out
