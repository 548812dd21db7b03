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

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.checks import MAX_CHUNK
from vlm_serve.kernels.gated_delta.reference import Tokens
from vlm_serve.kernels.gated_delta.step_triton import EPS, sizes_of, views
from vlm_serve.kernels.metadata import PrefillMeta
from vlm_serve.kernels.triton_support import current_target, launch
from vlm_serve.kernels.triton_views import dots, slices

_CHUNK = tl.constexpr(MAX_CHUNK)


class Chunks(NamedTuple):
    """The state-independent part of every chunk; see `prepare_chunks`."""

    w: torch.Tensor
    u: torch.Tensor
    attention: torch.Tensor
    q_factor: torch.Tensor
    k_factor: torch.Tensor
    chunk_factor: torch.Tensor


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
        turned = tl.trans(keys.to(DOT.dtype))
        system = tl.dot(keys.to(DOT.dtype), turned, system, input_precision=DOT.precision)
        scores = tl.dot(queries.to(DOT.dtype), turned, scores, input_precision=DOT.precision)
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
    DOT: tl.constexpr,
):
    """Store inverse @ diag(factors) source in column tiles, so that few rows of it are live."""
    for start in tl.static_range(0, SIZE, TILE):
        columns = start + tl.arange(0, TILE)
        inside = inside_rows[:, None] & (columns < SIZE)[None, :]
        rows = tl.load(source + source_places[:, None] + columns[None, :], mask=inside, other=0.0)
        scaled = (rows.to(tl.float32) * factors[:, None]).to(inverse.dtype)
        product = tl.dot(inverse, scaled, input_precision=DOT.precision)
        places = out_places[:, None] + columns[None, :]
        tl.store(out + places, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _prepare_kernel(
    tokens, made, slices, scale, SIZES: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr
):
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(slices.chunk_bounds + chunk).to(tl.int64)
    end = tl.load(slices.chunk_bounds + chunk + 1).to(tl.int64)
    index = tl.arange(0, _CHUNK)
    token = begin + index
    inside = token < end
    decays = tl.load(tokens.g.at + token * tokens.g.stride + head, mask=inside, other=0.0)
    total = tl.cumsum(decays, axis=0)
    strength = tl.load(tokens.beta.at + token * tokens.beta.stride + head, mask=inside, other=0.0)
    strength = strength.to(tl.float32)
    k = tokens.k.at + (head // SIZES.ratio) * tokens.k.head
    q = tokens.q.at + (head // SIZES.ratio) * tokens.q.head
    q_rows, k_rows = token * tokens.q.token, token * tokens.k.token
    scores, system, query_norm, key_norm = _products(
        q, k, q_rows, k_rows, inside, SIZES.key_dim, TILE, DOT
    )
    query_norm *= scale
    # Only j <= i is ever used; above the diagonal the difference may overflow exp.
    visible = index[:, None] >= index[None, :]
    decay = tl.exp(tl.where(visible, total[:, None] - total[None, :], 0.0)) * key_norm[None, :]
    scores = tl.where(visible, scores * decay * query_norm[:, None], 0.0)
    places = (chunk.to(tl.int64) * SIZES.heads + head) * _CHUNK * _CHUNK
    places += index[:, None] * _CHUNK + index[None, :]
    tl.store(made.attention + places, scores.to(made.attention.dtype.element_ty))
    system = system * decay * (key_norm * strength)[:, None]
    system = tl.where(index[:, None] > index[None, :], system, 0.0)
    # Errors of the inverse would enter every later token, so it is float32 for all inputs.
    inverse = _invert_unit_lower(system, _CHUNK // 2, "ieee").to(DOT.dtype)

    rows = token * SIZES.heads + head
    growth = tl.exp(total)
    last = tl.sum(tl.where(token == end - 1, total, 0.0), axis=0)
    tl.store(made.q_factor + rows, query_norm * growth, mask=inside)
    tl.store(made.k_factor + rows, key_norm * tl.exp(last - total), mask=inside)
    tl.store(made.chunk_factor + chunk * SIZES.heads + head, tl.exp(last))
    factors, places = strength * growth * key_norm, rows * SIZES.key_dim
    _times_rows(inverse, factors, k, k_rows, made.w, places, inside, SIZES.key_dim, TILE, DOT)
    v = tokens.v.at + head * tokens.v.head
    v_rows, places = token * tokens.v.token, rows * SIZES.value_dim
    _times_rows(inverse, strength, v, v_rows, made.u, places, inside, SIZES.value_dim, TILE, DOT)


def prepare_chunks(packed: Tokens, meta: PrefillMeta) -> Chunks:
    """Compute the state-independent part of every chunk.

    Returns:
        w `[N, Hv, Dk]`, u `[N, Hv, Dv]`, attention `[C, Hv, 64, 64]` in the dtype of products;
        float32 q_factor and k_factor `[N, Hv]`, chunk_factor `[C, Hv]`. C is the number of chunks.
        The tile is 64 tokens even for short chunks, so that a chunk's bits do not depend on the
        other chunks of the step.
    """
    q, v = packed.q, packed.v
    tables = slices(meta, q.device)
    chunks = tables.chunk_sequence.shape[0]
    tokens, heads, value_dim = v.shape
    key_dim = q.shape[2]
    # float32 operands are split in three for tensor cores: narrower tiles keep them in registers.
    tile = 32 if q.dtype == torch.float32 or min(key_dim, value_dim) < 64 else 64
    dtype = torch.float32 if current_target().backend == "interpreter" else q.dtype
    made = Chunks(
        w=torch.empty(tokens, heads, key_dim, dtype=dtype, device=q.device),
        u=torch.empty(tokens, heads, value_dim, dtype=dtype, device=q.device),
        attention=torch.empty(chunks, heads, MAX_CHUNK, MAX_CHUNK, dtype=dtype, device=q.device),
        q_factor=torch.empty(tokens, heads, device=q.device),
        k_factor=torch.empty(tokens, heads, device=q.device),
        chunk_factor=torch.empty(chunks, heads, device=q.device),
    )
    arguments = {
        "tokens": views(packed),
        "made": made,
        "slices": tables,
        "scale": key_dim**-0.5,
        "SIZES": sizes_of(packed),
        "TILE": tile,
        "DOT": dots(q.dtype),
    }
    warps = 8 if q.dtype == torch.float32 else 4
    launch(_prepare_kernel, (chunks, heads), arguments, num_warps=warps)
    return made
