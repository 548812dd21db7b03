"""Gated delta rule on a GPU: the state-independent part of every chunk.

Inside a chunk with incoming state S, cumulative log decay G and unit keys k, the recurrence is the
unit lower triangular system (I + A) V' = diag(beta) (V - diag(exp G) K S) with
A[i, j] = beta_i exp(G_i - G_j) k_i . k_j for j < i (Yang et al. 2024, section 3). With
T = (I + A)^-1 the solution is V' = U - W S for U = T diag(beta) V, W = T diag(beta exp G) K, and

    O  = diag(exp G) Q S + (Q K^T * decay) V'
    S' = exp(G_last) S + (diag(exp(G_last - G)) K)^T V'

This kernel runs for all chunks at once. It stores W, U, the decayed Q K^T, and the row factors that
turn raw queries and keys into the scaled ones. The sequential kernel is then four products.
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
    current_target,
    dot_dtype,
    launch,
    prefill_tables,
)

EPS = tl.constexpr(1e-6)


@triton.jit
def _invert_unit_lower(a, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Invert I + a for strictly lower triangular a `[2 * HALF, 2 * HALF]`, in float32.

    Both diagonal blocks are inverted by forward substitution, row by row: products of powers of a
    would cancel catastrophically where keys repeat. The block below follows from them.
    """
    blocks = tl.reshape(a, (2, HALF, 2, HALF))
    # Index vectors of the four axes, each shaped to broadcast over the blocks.
    upper = tl.arange(0, 2)[:, None, None, None]
    left = tl.arange(0, 2)[None, None, :, None]
    diagonal = tl.sum(tl.where(upper == left, blocks, 0.0), axis=2)
    below = tl.sum(tl.sum(tl.where(upper > left, blocks, 0.0), axis=2), axis=0)
    rows = tl.arange(0, HALF)[None, :, None]
    columns = tl.arange(0, HALF)[None, None, :]
    inverse = tl.where(rows == columns, 1.0, 0.0) + tl.zeros((2, HALF, HALF), tl.float32)
    for i in range(1, HALF):
        row = tl.sum(tl.where(rows == i, diagonal, 0.0), axis=1)
        change = tl.sum(row[:, :, None] * inverse, axis=1)
        inverse = tl.where(rows == i, inverse - change[:, None, :], inverse)
    which = tl.arange(0, 2)[:, None, None]
    first = tl.sum(tl.where(which == 0, inverse, 0.0), axis=0)
    second = tl.sum(tl.where(which == 1, inverse, 0.0), axis=0)
    corner = tl.dot(below, first, input_precision=PRECISION)
    corner = tl.dot(second, corner, input_precision=PRECISION)
    result = tl.where(upper == left, inverse[:, :, None, :], 0.0)
    result = tl.where(upper > left, -corner[None, :, None, :], result)
    return tl.reshape(result, (2 * HALF, 2 * HALF))


@triton.jit
def _products(
    q,
    k,
    q_places,
    k_places,
    inside_rows,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute Q K^T and K K^T of raw rows, and the reciprocal lengths of both, in tiles of dims."""
    CHUNK: tl.constexpr = inside_rows.shape[0]
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    system = tl.zeros((CHUNK, CHUNK), tl.float32)
    q_squares = tl.zeros((CHUNK,), tl.float32)
    k_squares = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, SIZE, TILE):
        dims = start + tl.arange(0, TILE)
        inside = inside_rows[:, None] & (dims < SIZE)[None, :]
        keys = tl.load(k + k_places[:, None] + dims[None, :], mask=inside, other=0.0)
        queries = tl.load(q + q_places[:, None] + dims[None, :], mask=inside, other=0.0)
        wide = keys.to(tl.float32)
        k_squares += tl.sum(wide * wide, axis=1)
        wide = queries.to(tl.float32)
        q_squares += tl.sum(wide * wide, axis=1)
        turned = tl.trans(keys.to(DOT))
        system = tl.dot(keys.to(DOT), turned, system, input_precision=PRECISION)
        scores = tl.dot(queries.to(DOT), turned, scores, input_precision=PRECISION)
    return scores, system, tl.rsqrt(q_squares + EPS), tl.rsqrt(k_squares + EPS)


@triton.jit
def _times_rows(
    inverse,
    factors,
    source,
    source_places,
    out,
    out_places,
    inside_rows,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Store inverse @ diag(factors) source in column tiles, so that few rows of it are live."""
    for start in tl.static_range(0, SIZE, TILE):
        columns = start + tl.arange(0, TILE)
        inside = inside_rows[:, None] & (columns < SIZE)[None, :]
        rows = tl.load(source + source_places[:, None] + columns[None, :], mask=inside, other=0.0)
        scaled = (rows.to(tl.float32) * factors[:, None]).to(inverse.dtype)
        product = tl.dot(inverse, scaled, input_precision=PRECISION)
        places = out_places[:, None] + columns[None, :]
        tl.store(out + places, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _prepare_kernel(
    q,
    k,
    v,
    g,
    beta,
    w,
    u,
    attention,
    q_factor,
    k_factor,
    chunk_factor,
    chunk_bounds,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    g_stride,
    beta_stride,
    scale,
    RATIO: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(chunk_bounds + chunk).to(tl.int64)
    end = tl.load(chunk_bounds + chunk + 1).to(tl.int64)
    index = tl.arange(0, CHUNK)
    tokens = begin + index
    inside = tokens < end
    total = tl.cumsum(tl.load(g + tokens * g_stride + head, mask=inside, other=0.0), axis=0)
    strength = tl.load(beta + tokens * beta_stride + head, mask=inside, other=0.0).to(tl.float32)
    k += (head // RATIO) * k_head_stride
    q += (head // RATIO) * q_head_stride
    q_rows, k_rows = tokens * q_token_stride, tokens * k_token_stride
    scores, system, query_norm, key_norm = _products(
        q, k, q_rows, k_rows, inside, KEY_DIM, KEY_TILE, DOT, PRECISION
    )
    query_norm *= scale
    # Only j <= i is ever used; above the diagonal the difference may overflow exp.
    visible = index[:, None] >= index[None, :]
    decay = tl.exp(tl.where(visible, total[:, None] - total[None, :], 0.0)) * key_norm[None, :]
    scores = tl.where(visible, scores * decay * query_norm[:, None], 0.0)
    places = (chunk.to(tl.int64) * HEADS + head) * CHUNK * CHUNK
    places += index[:, None] * CHUNK + index[None, :]
    tl.store(attention + places, scores.to(attention.dtype.element_ty))
    system = system * decay * (key_norm * strength)[:, None]
    system = tl.where(index[:, None] > index[None, :], system, 0.0)
    # Errors of the inverse would enter every later token, so it is float32 for all inputs.
    inverse = _invert_unit_lower(system, CHUNK // 2, "ieee").to(DOT)

    rows = tokens * HEADS + head
    growth = tl.exp(total)
    last = tl.sum(tl.where(tokens == end - 1, total, 0.0), axis=0)
    tl.store(q_factor + rows, query_norm * growth, mask=inside)
    tl.store(k_factor + rows, key_norm * tl.exp(last - total), mask=inside)
    tl.store(chunk_factor + chunk * HEADS + head, tl.exp(last))
    factors, places = strength * growth * key_norm, rows * KEY_DIM
    _times_rows(inverse, factors, k, k_rows, w, places, inside, KEY_DIM, COLUMN_TILE, PRECISION)
    v += head * v_head_stride
    v_rows, places = tokens * v_token_stride, rows * VALUE_DIM
    _times_rows(inverse, strength, v, v_rows, u, places, inside, VALUE_DIM, COLUMN_TILE, PRECISION)


def prepare_chunks(packed: Tokens, meta: PrefillMeta) -> dict[str, torch.Tensor]:
    """Compute the state-independent part of every chunk.

    Returns:
        w `[N, Hv, Dk]`, u `[N, Hv, Dv]`, attention `[C, Hv, 64, 64]` in the dtype of products;
        float32 q_factor and k_factor `[N, Hv]`, chunk_factor `[C, Hv]`. C is the number of chunks.
        The tile is 64 tokens even for short chunks, so that a chunk's bits do not depend on the
        other chunks of the step.
    """
    q, k, v, g, beta = packed
    tables = prefill_tables(meta, q.device)
    chunks = tables["chunk_sequence"].shape[0]
    tokens, heads, value_dim = v.shape
    key_dim = q.shape[2]
    target = current_target()
    # float32 operands are split in three for tensor cores: narrower tiles keep them in registers.
    tile = 32 if q.dtype == torch.float32 or min(key_dim, value_dim) < 64 else 64
    dtype = torch.float32 if target.backend == "interpreter" else q.dtype
    made = {
        "w": torch.empty(tokens, heads, key_dim, dtype=dtype, device=q.device),
        "u": torch.empty(tokens, heads, value_dim, dtype=dtype, device=q.device),
        "attention": torch.empty(chunks, heads, MAX_CHUNK, MAX_CHUNK, dtype=dtype, device=q.device),
        "q_factor": torch.empty(tokens, heads, device=q.device),
        "k_factor": torch.empty(tokens, heads, device=q.device),
        "chunk_factor": torch.empty(chunks, heads, device=q.device),
    }
    arguments = {
        **packed._asdict(),
        **made,
        "chunk_bounds": tables["chunk_bounds"],
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "k_token_stride": k.stride(0),
        "k_head_stride": k.stride(1),
        "v_token_stride": v.stride(0),
        "v_head_stride": v.stride(1),
        "g_stride": g.stride(0),
        "beta_stride": beta.stride(0),
        "scale": key_dim**-0.5,
        "RATIO": heads // q.shape[1],
        "HEADS": heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_TILE": tile,
        "COLUMN_TILE": tile,
        "CHUNK": MAX_CHUNK,
        "DOT": dot_dtype(q.dtype),
        "PRECISION": target.dot_precision,
    }
    warps = 8 if q.dtype == torch.float32 else 4
    launch(_prepare_kernel, (chunks, heads), arguments, num_warps=warps)
    return made
