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
from vlm_serve.kernels.gated_delta.step_triton import STEP_COLUMNS, advance, step_arguments
from vlm_serve.kernels.gated_delta.tokens import Tokens
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta
from vlm_serve.kernels.triton_support import (
    current_target,
    decode_tables,
    dot_dtype,
    launch,
    needs_other_form,
    power_of_two,
    prefill_tables,
)


@triton.jit
def _scan_kernel(
    q,
    k,
    w,
    u,
    attention,
    q_factor,
    k_factor,
    chunk_factor,
    state,
    out,
    src_rows,
    dst_rows,
    first_chunk,
    chunk_bounds,
    chunk_snapshot,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    state_row_stride,
    RATIO: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence = tl.program_id(2)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_KEY)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    index = tl.arange(0, CHUNK)
    tile_inside = (dims < KEY_DIM)[:, None] & (columns < VALUE_DIM)[None, :]
    tile = head * KEY_DIM * VALUE_DIM + dims[:, None] * VALUE_DIM + columns[None, :]
    q += (head // RATIO) * q_head_stride
    k += (head // RATIO) * k_head_stride

    current = tl.zeros((BLOCK_KEY, COLUMNS), tl.float32)
    src = tl.load(src_rows + sequence).to(tl.int64)
    if src >= 0:
        stored = tl.load(state + src * state_row_stride + tile, mask=tile_inside, other=0.0)
        current = stored.to(tl.float32)
    first = tl.load(first_chunk + sequence)
    attention += (first * HEADS + head).to(tl.int64) * CHUNK * CHUNK
    for chunk in range(first, tl.load(first_chunk + sequence + 1)):
        begin = tl.load(chunk_bounds + chunk).to(tl.int64)
        tokens = begin + index
        inside = tokens < tl.load(chunk_bounds + chunk + 1)
        inside_keys = inside[:, None] & (dims < KEY_DIM)[None, :]
        inside_values = inside[:, None] & (columns < VALUE_DIM)[None, :]
        rows = tokens * HEADS + head

        operand = current.to(DOT)
        places = rows[:, None] * KEY_DIM + dims[None, :]
        reads = tl.load(w + places, mask=inside_keys, other=0.0).to(DOT)
        places = rows[:, None] * VALUE_DIM + columns[None, :]
        new = tl.load(u + places, mask=inside_values, other=0.0).to(tl.float32)
        new -= tl.dot(reads, operand, input_precision=PRECISION)

        keys = tl.load(
            k + tokens[None, :] * k_token_stride + dims[:, None],
            mask=inside[None, :] & (dims < KEY_DIM)[:, None],
            other=0.0,
        )
        factor = tl.load(k_factor + rows, mask=inside, other=0.0)
        added = (new * factor[:, None]).to(DOT)
        current *= tl.load(chunk_factor + chunk * HEADS + head)
        current = tl.dot(keys.to(DOT), added, current, input_precision=PRECISION)

        queries = tl.load(
            q + tokens[:, None] * q_token_stride + dims[None, :], mask=inside_keys, other=0.0
        )
        factor = tl.load(q_factor + rows, mask=inside, other=0.0)
        result = tl.dot(queries.to(DOT), operand, input_precision=PRECISION) * factor[:, None]
        square = (chunk - first).to(tl.int64) * HEADS * CHUNK * CHUNK + index[:, None] * CHUNK
        scores = tl.load(attention + square + index[None, :])
        result = tl.dot(scores.to(DOT), new.to(DOT), result, input_precision=PRECISION)
        tl.store(out + places, result.to(out.dtype.element_ty), mask=inside_values)

        # A resumed run reads the rounded state from the pool, so an unsplit one must round it too.
        rounded = current.to(state.dtype.element_ty)
        current = rounded.to(tl.float32)
        snapshot = tl.load(chunk_snapshot + chunk).to(tl.int64)
        if snapshot >= 0:
            tl.store(state + snapshot * state_row_stride + tile, rounded, mask=tile_inside)
    dst = tl.load(dst_rows + sequence).to(tl.int64)
    places = dst * state_row_stride + tile
    tl.store(state + places, current.to(state.dtype.element_ty), mask=tile_inside)


def chunk_gated_delta(tokens: Tokens, state: torch.Tensor, meta: PrefillMeta) -> torch.Tensor:
    q, k, v = tokens.q, tokens.k, tokens.v
    tables = prefill_tables(meta, q.device)
    heads, value_dim = v.shape[1:]
    key_dim = q.shape[2]
    made = prepare_chunks(tokens, meta)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    target = current_target()
    # float32 operands take three times the registers (see `Target.dot_precision`). The tile's shape
    # depends on nothing else, so that a sequence's bits do not depend on the batch.
    wide = q.dtype == torch.float32
    narrow = not wide and needs_other_form("chunk_gated_delta", target)
    columns = 16 if wide or narrow else 32
    arguments = {
        "q": q,
        "k": k,
        **made,
        "state": state,
        "out": out,
        "src_rows": tables["src_rows"],
        "dst_rows": tables["dst_rows"],
        "first_chunk": tables["first_chunk"],
        "chunk_bounds": tables["chunk_bounds"],
        "chunk_snapshot": tables["chunk_snapshot"],
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "k_token_stride": k.stride(0),
        "k_head_stride": k.stride(1),
        "state_row_stride": state.stride(0),
        "RATIO": heads // q.shape[1],
        "HEADS": heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_KEY": power_of_two(key_dim, 16),
        "COLUMNS": columns,
        "CHUNK": MAX_CHUNK,
        "DOT": dot_dtype(q.dtype),
        "PRECISION": target.dot_precision,
    }
    grid = (triton.cdiv(value_dim, columns), heads, len(meta))
    # One stage: with two, Triton 3.6 gave wrong outputs on an H100 (errors of a tenth, with right
    # states), and on CDNA a second stage does not fit in the 64 KiB of LDS. Eight warps where
    # products take both operands from registers, which four warps spill.
    from_registers = target.backend == "cuda" and not target.roomy
    warps = 2 if narrow else 8 if wide or from_registers else 4
    launch(_scan_kernel, grid, arguments, num_warps=warps)
    return out


@triton.jit
def _step_kernel(
    q,
    k,
    v,
    g,
    beta,
    state,
    out,
    src_rows,
    dst_rows,
    snapshot_rows,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    g_stride,
    beta_stride,
    state_row_stride,
    scale,
    RATIO: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    sequence = tl.program_id(2)
    head = tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    result = advance(
        sequence,
        head,
        columns,
        q,
        k,
        v,
        g,
        beta,
        state,
        src_rows,
        dst_rows,
        snapshot_rows,
        q_token_stride,
        q_head_stride,
        k_token_stride,
        k_head_stride,
        v_token_stride,
        v_head_stride,
        g_stride,
        beta_stride,
        state_row_stride,
        scale,
        RATIO,
        HEADS,
        KEY_DIM,
        VALUE_DIM,
        BLOCK_KEY,
    )
    places = (sequence.to(tl.int64) * HEADS + head) * VALUE_DIM + columns
    tl.store(out + places, result.to(out.dtype.element_ty), mask=columns < VALUE_DIM)


def recurrent_gated_delta(tokens: Tokens, state: torch.Tensor, meta: DecodeMeta) -> torch.Tensor:
    v = tokens.v
    tables = decode_tables(meta, v.device)
    batch, heads, value_dim = v.shape
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    arguments = {
        **step_arguments(tokens, state, out),
        "src_rows": tables["src_rows"],
        "dst_rows": tables["dst_rows"],
        "snapshot_rows": tables["snapshot_rows"],
    }
    grid = (triton.cdiv(value_dim, STEP_COLUMNS), heads, batch)
    launch(_step_kernel, grid, arguments, num_warps=4)
    return out
