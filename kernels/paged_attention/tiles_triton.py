"""Online softmax over paged keys for one tile of query rows; shared by prefill and decode."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.kv_quant.triton import INT8, decode_stored, page_arguments, stored_form
from vlm_serve.kernels.metadata import KVLayer
from vlm_serve.kernels.triton_support import Tables, current_target, dot_dtype, power_of_two
from vlm_serve.kernels.tuning import tuned

_CONSUMER = 99 << 10
"""Bytes of shared memory of a program on consumer cards, where one tile less is in flight."""


@dataclass(frozen=True)
class AttentionTile:
    """Tile shape of a program: query rows, keys per step, warps, and stages of the key loop."""

    rows: int
    keys: int
    warps: int
    stages: int


def prefill_tile(dtype: torch.dtype, dim: int, int8: bool) -> AttentionTile:
    """Return the prefill tile for a target, dtype and head dim.

    Nothing else decides: equal tiles in every batch keep a token's bits. At head dim 256 the
    running output of 128 rows takes 128 registers per thread of 8 warps. The conversion of int8
    pages spills with more than 16 keys at a time. An A100 spills with more than 64 rows, since its
    products take operands from registers. CDNA has 64 KiB for keys and values.
    """
    target = current_target()
    stages = 3 if target.shared_memory > _CONSUMER else 2
    if dtype == torch.float32:
        return AttentionTile(16, 16, 8, 1) if dim > 128 else AttentionTile(32, 32, 4, 1)
    if target.backend == "hip":
        return AttentionTile(64, 32 if dim > 128 else 64, 4, 1)
    if dim > 128:
        rows, keys = (128, 16 if int8 else 32) if target.roomy else (64, 32)
        return AttentionTile(rows, keys, 8, stages)
    return AttentionTile(128, 64, 4 if dim <= 64 else 8, stages)


def decode_tile(dtype: torch.dtype, dim: int, group: int) -> AttentionTile:
    """Return the decode tile: query heads of one key head, padded to the smallest dot.

    Three tiles of keys and values are in flight where shared memory lets two programs of them
    share a multiprocessor. On consumer cards two tiles are.
    """
    rows = power_of_two(group, 16)
    if dtype == torch.float32:
        return AttentionTile(rows, 16, 8, 1) if dim > 128 else AttentionTile(rows, 32, 4, 1)
    target = current_target()
    keys, stages = 32 if dim > 128 else 64, 4 if target.shared_memory > _CONSUMER else 3
    if target.backend == "hip":
        return AttentionTile(rows, keys, 4, 1)

    def shared(tile: Mapping[str, int]) -> int:
        """Return the bytes of keys and values in flight, and of the queries."""
        return 2 * power_of_two(dim, 16) * (2 * (tile["stages"] - 1) * tile["keys"] + rows)

    usual = {"keys": keys, "warps": 4, "stages": stages}
    op = f"attention decode, head dim {dim}"
    return AttentionTile(rows, **tuned(op, target, usual, shared))


def attention_arguments(
    q: torch.Tensor, kv: KVLayer, tables: Tables, scale: float, tile: AttentionTile
) -> dict[str, Any]:
    """Return the arguments of both kernels.

    These are pages, block tables, head layout, score scale (for exp2) and dtypes.
    """
    heads, dim = q.shape[1:]
    target = current_target()
    return {
        "q": q,
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        **page_arguments(kv),
        "block_tables": tables["block_tables"],
        "table_stride": tables["block_tables"].stride(0),
        "score_scale": scale * math.log2(math.e),
        "GROUP": heads // kv.k.shape[2],
        "HEADS": heads,
        "DIM": dim,
        "BLOCK_DIM": power_of_two(dim, 16),
        "ROWS": tile.rows,
        "KEY_TILE": tile.keys,
        "ONE_BLOCK": kv.k.shape[1] % tile.keys == 0,
        "FORM": stored_form(kv, target),
        "DOT": dot_dtype(q.dtype),
        "PRECISION": target.dot_precision,
    }


@triton.jit
def _blocks(table, start, last_key, block_size, KEY_TILE: tl.constexpr, ONE_BLOCK: tl.constexpr):
    """Load the block of a tile's keys, or with several blocks that of each; 0 past `last_key`."""
    keys_at = start if ONE_BLOCK else start + tl.arange(0, KEY_TILE)
    return tl.load(table + keys_at // block_size, mask=keys_at < last_key, other=0)


@triton.jit
def attend(
    queries,
    positions,
    keys_of_program,
    length,
    table,
    kv_head,
    pages,
    page_strides,
    scale_strides,
    block_size,
    score_scale,
    DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    PRECISION: tl.constexpr,
    HIDDEN: tl.constexpr = 0,
):
    """Attend with one tile of queries to a range of keys of one key head.

    A row's arithmetic depends on its own query and the keys before it alone: a tile of keys that
    masks all of a row leaves its three values bit for bit as they were: -inf and zeros if it has
    seen none. Keys from `whole` on are
    masked, because some are invisible to some rows or lie past `length`. Slots past the end of a
    sequence may hold anything, NaN included, so values and scales are selected, never multiplied.
    ONE_BLOCK: a tile of keys never crosses a block. It then has one 64-bit address instead of one
    per key and thread, which would take half of a prefill program's registers.

    Args:
        queries: `[ROWS, BLOCK_DIM]` in the dtype of products.
        positions: `[ROWS]`, the last key that each row sees.
        keys_of_program: (first, whole, last): every row sees all keys in [first, whole); keys in
            [whole, last) are masked.
        length: keys of the sequence.
        table: the sequence's row of the block table.
        pages: pointers to keys, values, and the scales and zero points of each.
        page_strides, scale_strides: (block, slot, head).
        score_scale: factor on the scores that makes them powers of two; positive.
        HIDDEN: first keys of the sequence that no row sees; they lie in masked tiles.

    Returns:
        best, norm: float32 `[ROWS]`, largest score and sum of weights.
        total: float32 `[ROWS, BLOCK_DIM]`, weighted values.
    """
    ROWS: tl.constexpr = queries.shape[0]
    BLOCK_DIM: tl.constexpr = queries.shape[1]
    DOT: tl.constexpr = queries.dtype
    first_key, whole, last_key = keys_of_program
    k_pages, v_pages, k_scales, k_zeros, v_scales, v_zeros = pages
    page_block_stride, page_slot_stride, page_head_stride = page_strides
    scale_block_stride, scale_slot_stride, scale_head_stride = scale_strides
    k_pages += kv_head * page_head_stride
    v_pages += kv_head * page_head_stride
    k_scales += kv_head * scale_head_stride
    k_zeros += kv_head * scale_head_stride
    v_scales += kv_head * scale_head_stride
    v_zeros += kv_head * scale_head_stride
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    norm = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, BLOCK_DIM), tl.float32)
    offsets = tl.arange(0, KEY_TILE)
    dims = tl.arange(0, BLOCK_DIM)
    # The pipeliner prefetches pages only if their addresses wait for no load of the same step.
    # So every step loads the blocks of the next one.
    ahead = _blocks(table, first_key, last_key, block_size, KEY_TILE, ONE_BLOCK)
    for masked in tl.static_range(2):
        first = whole if masked else first_key
        last = last_key if masked else whole
        for start in range(first, last, KEY_TILE):
            keys_at = start + offsets
            known = keys_at < length
            if HIDDEN:
                known = known & (keys_at >= HIDDEN)
            blocks = ahead.to(tl.int64)
            ahead = _blocks(table, start + KEY_TILE, last_key, block_size, KEY_TILE, ONE_BLOCK)
            if ONE_BLOCK:
                page = blocks * page_block_stride + start % block_size * page_slot_stride
                scale_at = blocks * scale_block_stride + start % block_size * scale_slot_stride
                page_rows = offsets * page_slot_stride
                scale_rows = offsets * scale_slot_stride
            else:
                page = 0
                scale_at = 0
                page_rows = blocks * page_block_stride + keys_at % block_size * page_slot_stride
                scale_rows = blocks * scale_block_stride + keys_at % block_size * scale_slot_stride
            places = page_rows[:, None] + dims[None, :]
            if masked or BLOCK_DIM != DIM:
                inside = known[:, None] & (dims < DIM)[None, :]
                keys = tl.load(k_pages + page + places, mask=inside, other=0)
            else:
                keys = tl.load(k_pages + page + places)
            keys = decode_stored(keys, FORM, DOT)
            if FORM == INT8:
                zero = tl.load(k_zeros + scale_at + scale_rows, mask=known, other=0.0)
                # Integers up to 255 are exact in every operand dtype.
                keys = keys - zero.to(DOT)[:, None]
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            if FORM == INT8:
                scale = tl.load(k_scales + scale_at + scale_rows, mask=known, other=0.0).to(
                    tl.float32
                )
                scores = scores * scale[None, :]
            if masked:
                scores = tl.where(keys_at[None, :] <= positions[:, None], scores, float("-inf"))
                if HIDDEN:
                    scores = tl.where((keys_at >= HIDDEN)[None, :], scores, float("-inf"))
            larger = tl.maximum(best, tl.max(scores, axis=1))
            top = larger
            if masked:
                # A part may begin behind all keys that a row sees: its weights are 0, not NaN.
                top = tl.where(larger == float("-inf"), 0.0, larger)
            # Fused by hand: the compiler's fusions differ with and without masks, and a row that
            # meets a key in either must give it the same weight.
            shrink = tl.exp2((best - top) * score_scale)
            weights = tl.exp2(tl.fma(scores, score_scale, (-top * score_scale)[:, None]))
            norm = norm * shrink + tl.sum(weights, axis=1)
            total = total * shrink[:, None]
            best = larger
            if masked or BLOCK_DIM != DIM:
                inside = known[:, None] & (dims < DIM)[None, :]
                values = tl.load(v_pages + page + places, mask=inside, other=0)
            else:
                values = tl.load(v_pages + page + places)
            values = decode_stored(values, FORM, DOT)
            if FORM == INT8:
                zero = tl.load(v_zeros + scale_at + scale_rows, mask=known, other=0.0)
                values = values - zero.to(DOT)[:, None]
                scale = tl.load(v_scales + scale_at + scale_rows, mask=known, other=0.0).to(
                    tl.float32
                )
                weights = weights * scale[None, :]
            total = tl.dot(weights.to(DOT), values, total, input_precision=PRECISION)
    return best, norm, total
