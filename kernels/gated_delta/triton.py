"""Gated delta rule on a GPU: the state-independent part of every chunk, the sequential pass over
chunks, and the decode step.

Inside a chunk with incoming state S, cumulative log decay G and unit keys k, the recurrence is the
unit lower triangular system (I + A) V' = diag(beta) (V - diag(exp G) K S) with
A[i, j] = beta_i exp(G_i - G_j) k_i . k_j for j < i (Yang et al. 2024, section 3). With
T = (I + A)^-1 the solution is V' = U - W S for U = T diag(beta) V, W = T diag(beta exp G) K, and

    O  = diag(exp G) Q S + (Q K^T * decay) V'
    S' = exp(G_last) S + (diag(exp(G_last - G)) K)^T V'

The first kernel runs for all chunks at once. It stores W, U, the decayed Q K^T, and the row factors
that turn raw queries and keys into the scaled ones. The sequential kernel is then four products.

The state of one (sequence, value head, tile of value columns) stays in registers from the source
row to the destination row: `Dk x 32` float32, 32 registers per thread at Dk = 128. The same pass
makes the outputs, and a snapshot is one more store of the tile. So memory holds no per-chunk
states, and between chunks the state never leaves the program.

Over drafted tokens a tile stays in registers as well, from the row through all tokens of a slice.
Updates of earlier tokens are folded in while the tile is read. New updates go to separate memory
first: programs of other tiles may still have to read the old ones.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.checks import MAX_CHUNK
from vlm_serve.kernels.gated_delta.mamba2_triton import chunk_mamba2
from vlm_serve.kernels.gated_delta.reference import Tokens
from vlm_serve.kernels.gated_delta.step_triton import (
    EPS,
    STEP_COLUMNS,
    advance,
    load_token,
    sizes_of,
    step,
    step_arguments,
    views,
)
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta, Updates, VerifyMeta
from vlm_serve.kernels.triton_support import current_target, launch, needs_other_form, verify_tables
from vlm_serve.kernels.triton_views import dots, moves, rows, slices

_CHUNK = tl.constexpr(MAX_CHUNK)
KEPT_TILE = 1024
"""Values of an update that a program keeps."""


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
    chunked = Chunks(
        w=torch.empty(tokens, heads, key_dim, dtype=dtype, device=q.device),
        u=torch.empty(tokens, heads, value_dim, dtype=dtype, device=q.device),
        attention=torch.empty(chunks, heads, MAX_CHUNK, MAX_CHUNK, dtype=dtype, device=q.device),
        q_factor=torch.empty(tokens, heads, device=q.device),
        k_factor=torch.empty(tokens, heads, device=q.device),
        chunk_factor=torch.empty(chunks, heads, device=q.device),
    )
    arguments = {
        "tokens": views(packed),
        "made": chunked,
        "slices": tables,
        "scale": key_dim**-0.5,
        "SIZES": sizes_of(packed),
        "TILE": tile,
        "DOT": dots(q.dtype),
    }
    warps = 8 if q.dtype == torch.float32 else 4
    launch(_prepare_kernel, (chunks, heads), arguments, num_warps=warps)
    return chunked


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
    if tokens.skip is not None:
        return chunk_mamba2(tokens, state, meta)
    q, v = tokens.q, tokens.v
    count, value_dim = v.shape[1:]
    chunked = prepare_chunks(tokens, meta)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    target = current_target()
    # float32 operands take three times the registers (see `Target.dot_precision`). The tile's shape
    # depends on nothing else, so that a sequence's bits do not depend on the batch.
    wide = q.dtype == torch.float32
    narrow = not wide and needs_other_form("chunk_gated_delta", target)
    columns = 16 if wide or narrow else 32
    arguments = {
        "tokens": views(tokens),
        "made": chunked,
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


class _Parts(NamedTuple):
    """Unit keys, changes and decays of updates."""

    keys: torch.Tensor
    changes: torch.Tensor
    decays: torch.Tensor


@triton.jit(do_not_specialize=["room"])
def _verify_kernel(tokens, state, out, old, new, table, scale, room, SIZES: tl.constexpr):
    head = tl.program_id(1)
    key_head = head // SIZES.ratio
    dims = tl.arange(0, SIZES.block_key)
    columns = tl.program_id(0) * SIZES.columns + tl.arange(0, SIZES.columns)
    inside = dims < SIZES.key_dim
    inside_columns = columns < SIZES.value_dim
    tile_inside = inside[:, None] & inside_columns[None, :]
    table += tl.program_id(2) * 5
    row = tl.load(table).to(tl.int64)
    first = tl.load(table + 1).to(tl.int64)
    folded = tl.load(table + 2)
    tile = state.at + (row * state.stride + head * SIZES.key_dim * SIZES.value_dim)
    tile = tile + dims[:, None] * SIZES.value_dim + columns[None, :]

    current = tl.load(tile, mask=tile_inside, other=0.0).to(tl.float32)
    for place in range(0, folded):
        entry = first + place
        held = old.keys.at + entry * old.keys.stride + key_head * SIZES.key_dim + dims
        held_key = tl.load(held, mask=inside, other=0.0)
        held = old.changes.at + entry * old.changes.stride + head * SIZES.value_dim + columns
        held_change = tl.load(held, mask=inside_columns, other=0.0)
        current *= tl.load(old.decays.at + entry * old.decays.stride + head)
        current += held_key[:, None] * held_change[None, :]
        current = current.to(state.at.dtype.element_ty).to(tl.float32)
    if folded > 0:
        tl.store(tile, current.to(state.at.dtype.element_ty), mask=tile_inside)
    begin = tl.load(table + 3).to(tl.int64)
    for place in range(0, tl.load(table + 4)):
        token = begin + place
        query, key, value, gate, strength = load_token(tokens, token, head, dims, columns, SIZES)
        current, result, key, change, decay = step(
            current, query, key, value, gate, strength, scale, SIZES.delta
        )
        if not SIZES.delta:
            result += tl.load(tokens.skip + head) * value
        current = current.to(state.at.dtype.element_ty).to(tl.float32)
        own = (token * SIZES.heads + head) * SIZES.value_dim + columns
        tl.store(out + own, result.to(out.dtype.element_ty), mask=inside_columns)
        tl.store(new.changes + own, change, mask=inside_columns)
        if tl.program_id(0) == 0:
            tl.store(new.decays + token * SIZES.heads + head, decay)
            if head % SIZES.ratio == 0:
                shared = (token * (SIZES.heads // SIZES.ratio) + key_head) * SIZES.key_dim + dims
                tl.store(new.keys + shared, key, mask=inside)
    # Padding of a slice with a fixed place: later layers compute on it, so it must be finite.
    for place in range(tl.load(table + 4), room):
        own = ((begin + place) * SIZES.heads + head) * SIZES.value_dim + columns
        tl.store(out + own, tl.zeros((SIZES.columns,), out.dtype.element_ty), mask=inside_columns)


@triton.jit
def _keep_kernel(
    new,
    kept,
    entries,
    KEYS: tl.constexpr,
    CHANGES: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Keep a token's update in its entry; padding has none."""
    token = tl.program_id(0).to(tl.int64)
    entry = tl.load(entries + token).to(tl.int64)
    if entry >= 0:
        places = tl.program_id(1) * TILE + tl.arange(0, TILE)
        _keep_row(new.keys, token, kept.keys, entry, places, KEYS)
        _keep_row(new.changes, token, kept.changes, entry, places, CHANGES)
        _keep_row(new.decays, token, kept.decays, entry, places, HEADS)


@triton.jit
def _keep_row(new, token, kept, entry, places, SIZE: tl.constexpr):
    values = tl.load(new + token * SIZE + places, mask=places < SIZE, other=0.0)
    tl.store(kept.at + entry * kept.stride + places, values, mask=places < SIZE)


def verify_gated_delta(
    tokens: Tokens, state: torch.Tensor, updates: Updates, meta: VerifyMeta
) -> torch.Tensor:
    k, v = tokens.k, tokens.v
    tables = verify_tables(meta, v.device)
    computed = _Parts(
        *(
            torch.empty(size, device=v.device, dtype=torch.float32)
            for size in (k.shape, v.shape, v.shape[:2])
        )
    )
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    # In a captured step all slices have as much room, whatever tokens they have.
    lengths = {end - begin for begin, end in pairwise(meta.cu_seqlens)}
    room = lengths.pop() if len(lengths) == 1 else 0
    _launch(tokens, state, out, updates, computed, tables["slices"], room)
    _keep(updates, computed, tables["entries"])
    return out


def _keep(updates: Updates, computed: _Parts, entries: torch.Tensor) -> None:
    """Copy the tokens' updates to their entries."""
    keys, changes, decays = computed
    sizes = keys[0].numel(), changes[0].numel(), decays.shape[1]
    arguments = {
        "new": computed,
        "kept": _views(updates),
        "entries": entries,
        **dict(zip(("KEYS", "CHANGES", "HEADS"), sizes, strict=True)),
        "TILE": KEPT_TILE,
    }
    launch(_keep_kernel, (len(entries), triton.cdiv(max(sizes), KEPT_TILE)), arguments)


def fold_gated_delta(
    state: torch.Tensor, updates: Updates, folds: Sequence[tuple[int, int, int]]
) -> None:
    """Run the verify kernel on slices of no tokens, which only folds."""
    device = state.device
    table = torch.tensor([(*fold, 0, 0) for fold in folds], dtype=torch.int32, device=device)
    keys, values = updates.keys[:0], updates.changes[:0]
    gates = updates.decays[:0]
    none = Tokens(keys, keys, values, gates, gates, None)
    _launch(none, state, values, updates, _Parts(keys, values, gates), table, 0)


def _launch(tokens, state, out, updates, computed, table, room) -> None:
    heads, value_dim = tokens.v.shape[1:]
    arguments = {
        **step_arguments(tokens, state, out),
        "old": _views(updates),
        "new": computed,
        "table": table,
        "room": room,
        "SIZES": sizes_of(tokens),
    }
    grid = (triton.cdiv(value_dim, STEP_COLUMNS), heads, table.shape[0])
    launch(_verify_kernel, grid, arguments, num_warps=4)


def _views(updates: Updates) -> _Parts:
    return _Parts._make(map(rows, (updates.keys, updates.changes, updates.decays)))
