"""Split-KV decode attention on a GPU: splits of the keys are attended in parallel, then
combined."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.metadata import DecodeMeta, KVLayer
from vlm_serve.kernels.paged_attention.tiles_triton import (
    attend,
    attention_arguments,
    decode_tile,
)
from vlm_serve.kernels.triton_support import decode_tables, launch, power_of_two

# About two programs per multiprocessor of an H100; more only adds partial sums.
WANTED_PROGRAMS = 256
MAX_SPLITS = 64
KEYS_WORTH_A_SPLIT = 256


# The table's stride is the longest sequence's number of blocks: specialising on it would recompile
# the kernel while serving.
@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    q,
    out,
    best_parts,
    norm_parts,
    total_parts,
    kv_lens,
    block_tables,
    k_pages,
    v_pages,
    k_scales,
    k_zeros,
    v_scales,
    v_zeros,
    q_token_stride,
    q_head_stride,
    table_stride,
    page_block_stride,
    page_slot_stride,
    page_head_stride,
    scale_block_stride,
    scale_slot_stride,
    scale_head_stride,
    block_size,
    score_scale,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    FORM: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to one split of a sequence's keys from the query heads of one key head."""
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    length = tl.load(kv_lens + sequence)
    part = tl.cdiv(tl.cdiv(length, SPLITS), KEY_TILE) * KEY_TILE
    first_key = split * part
    last_key = tl.minimum(first_key + part, length)
    members = tl.arange(0, ROWS)
    heads = kv_head * GROUP + members
    dims = tl.arange(0, BLOCK_DIM)
    inside = (members < GROUP)[:, None] & (dims < DIM)[None, :]
    token = sequence.to(tl.int64)
    q_places = token * q_token_stride + heads[:, None] * q_head_stride + dims[None, :]
    queries = tl.load(q + q_places, mask=inside, other=0.0).to(DOT)
    positions = tl.zeros((ROWS,), tl.int32) + length - 1
    table = block_tables + token * table_stride
    # Whole tiles, then the rest of the last one; an empty split has neither.
    whole = first_key + tl.maximum(last_key - first_key, 0) // KEY_TILE * KEY_TILE
    best, norm, total = attend(
        queries,
        positions,
        (first_key, whole, last_key),
        length,
        table,
        kv_head,
        (k_pages, v_pages, k_scales, k_zeros, v_scales, v_zeros),
        (page_block_stride, page_slot_stride, page_head_stride),
        (scale_block_stride, scale_slot_stride, scale_head_stride),
        block_size,
        score_scale,
        DIM,
        KEY_TILE,
        ONE_BLOCK,
        FORM,
        PRECISION,
    )
    if SPLITS == 1:
        places = (token * HEADS + heads)[:, None] * DIM + dims[None, :]
        result = total / norm[:, None]
        tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)
    else:
        rows = (token * HEADS + heads) * SPLITS + split
        tl.store(best_parts + rows, best * score_scale, mask=members < GROUP)
        tl.store(norm_parts + rows, norm, mask=members < GROUP)
        tl.store(total_parts + rows[:, None] * DIM + dims[None, :], total, mask=inside)


@triton.jit
def _combine_kernel(
    best_parts,
    norm_parts,
    total_parts,
    out,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Combine the splits of one query head and sequence, each rescaled to the largest score."""
    row = tl.program_id(0).to(tl.int64)
    parts = row * SPLITS + tl.arange(0, SPLITS)
    dims = tl.arange(0, BLOCK_DIM)
    inside = dims < DIM
    best = tl.load(best_parts + parts)
    # Scores are exponents of two; a split without keys has a best of -inf and no weight.
    weights = tl.exp2(best - tl.max(best, axis=0))
    norm = tl.sum(tl.load(norm_parts + parts) * weights, axis=0)
    places = parts[:, None] * DIM + dims[None, :]
    totals = tl.load(total_parts + places, mask=inside[None, :], other=0.0)
    result = tl.sum(totals * weights[:, None], axis=0) / norm
    tl.store(out + row * DIM + dims, result.to(out.dtype.element_ty), mask=inside)


def split_count(programs: int, longest: int) -> int:
    """Return the number of splits per sequence, a power of two.

    It is large enough to fill the device. Splits stay so long that their combination costs less
    than the parallelism gains.
    """
    wanted = min(-(-WANTED_PROGRAMS // programs), -(-longest // KEYS_WORTH_A_SPLIT), MAX_SPLITS)
    return power_of_two(wanted)


def attention_decode(
    q: torch.Tensor, kv: KVLayer, meta: DecodeMeta, *, scale: float
) -> torch.Tensor:
    tables = decode_tables(meta, q.device)
    batch, heads, dim = q.shape
    kv_heads = kv.k.shape[2]
    tile = decode_tile(q.dtype, dim, heads // kv_heads)
    # The host's lengths: under a CUDA graph, the longest that it may replay on.
    splits = split_count(batch * kv_heads, max(meta.kv_lens))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    parts = {
        "best_parts": torch.empty(batch, heads, splits, device=q.device),
        "norm_parts": torch.empty(batch, heads, splits, device=q.device),
        "total_parts": torch.empty(batch, heads, splits, dim, device=q.device),
    }
    arguments = {
        "out": out,
        **parts,
        "kv_lens": tables["kv_lens"],
        **attention_arguments(q, kv, tables, scale, tile),
        "SPLITS": splits,
    }
    grid = (splits, kv_heads, batch)
    launch(_decode_kernel, grid, arguments, num_warps=tile.warps, num_stages=tile.stages)
    if splits > 1:
        shape = {"DIM": dim, "BLOCK_DIM": power_of_two(dim), "SPLITS": splits}
        launch(_combine_kernel, (batch * heads,), {**parts, "out": out, **shape}, num_warps=4)
    return out
