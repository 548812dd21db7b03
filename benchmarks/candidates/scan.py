"""The sequential pass of the gated delta rule with all loads of a chunk above its first product.

In the interpreter it has the bits of the kernel that serves. On an H200 with Triton 3.6.0, runs
with this scan and the inverse beside it had wrong outputs or read memory out of bounds: see
../notes/candidates.md.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.checks import MAX_CHUNK
from vlm_serve.kernels.gated_delta.tokens import Tokens
from vlm_serve.kernels.metadata import PrefillMeta
from vlm_serve.kernels.triton_support import (
    Tables,
    current_target,
    dot_dtype,
    launch,
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
    last = tl.load(first_chunk + sequence + 1)
    begin = tl.load(chunk_bounds + first).to(tl.int64)
    for chunk in range(first, last):
        end = tl.load(chunk_bounds + chunk + 1).to(tl.int64)
        tokens = begin + index
        inside = tokens < end
        begin = end
        inside_keys = inside[:, None] & (dims < KEY_DIM)[None, :]
        inside_values = inside[:, None] & (columns < VALUE_DIM)[None, :]
        rows = tokens * HEADS + head

        # Products wait for the chunk before. So all loads come first, and wait for memory once.
        places = rows[:, None] * KEY_DIM + dims[None, :]
        reads = tl.load(w + places, mask=inside_keys, other=0.0).to(DOT)
        places = rows[:, None] * VALUE_DIM + columns[None, :]
        new = tl.load(u + places, mask=inside_values, other=0.0).to(tl.float32)
        keys = tl.load(
            k + tokens[None, :] * k_token_stride + dims[:, None],
            mask=inside[None, :] & (dims < KEY_DIM)[:, None],
            other=0.0,
        )
        queries = tl.load(
            q + tokens[:, None] * q_token_stride + dims[None, :], mask=inside_keys, other=0.0
        )
        square = (chunk - first).to(tl.int64) * HEADS * CHUNK * CHUNK + index[:, None] * CHUNK
        scores = tl.load(attention + square + index[None, :])
        key_factor = tl.load(k_factor + rows, mask=inside, other=0.0)
        query_factor = tl.load(q_factor + rows, mask=inside, other=0.0)
        decay = tl.load(chunk_factor + chunk * HEADS + head)
        snapshot = tl.load(chunk_snapshot + chunk).to(tl.int64)

        operand = current.to(DOT)
        new -= tl.dot(reads, operand, input_precision=PRECISION)
        added = (new * key_factor[:, None]).to(DOT)
        current *= decay
        current = tl.dot(keys.to(DOT), added, current, input_precision=PRECISION)
        result = tl.dot(queries.to(DOT), operand, input_precision=PRECISION)
        result = result * query_factor[:, None]
        result = tl.dot(scores.to(DOT), new.to(DOT), result, input_precision=PRECISION)
        tl.store(out + places, result.to(out.dtype.element_ty), mask=inside_values)

        # A resumed run reads the rounded state from the pool, so an unsplit one must round it too.
        rounded = current.to(state.dtype.element_ty)
        current = rounded.to(tl.float32)
        if snapshot >= 0:
            tl.store(state + snapshot * state_row_stride + tile, rounded, mask=tile_inside)
    dst = tl.load(dst_rows + sequence).to(tl.int64)
    places = dst * state_row_stride + tile
    tl.store(state + places, current.to(state.dtype.element_ty), mask=tile_inside)


def scan(
    tokens: Tokens, made: Tables, state: torch.Tensor, meta: PrefillMeta, columns: int, warps: int
) -> torch.Tensor:
    """Return the outputs of all chunks; `made` is the result of `prepare_chunks`."""
    q, k, v = tokens.q, tokens.k, tokens.v
    tables = prefill_tables(meta, q.device)
    heads, value_dim = v.shape[1:]
    key_dim = q.shape[2]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    names = ("src_rows", "dst_rows", "first_chunk", "chunk_bounds", "chunk_snapshot")
    arguments = {
        "q": q,
        "k": k,
        **made,
        "state": state,
        "out": out,
        **{name: tables[name] for name in names},
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
        "PRECISION": current_target().dot_precision,
    }
    grid = (triton.cdiv(value_dim, columns), heads, len(meta))
    launch(_scan_kernel, grid, arguments, num_warps=warps)
    return out
