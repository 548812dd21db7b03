"""Attention over paged keys and values on a GPU: packed prefill tiles and split-KV decode, where
splits of the keys are attended in parallel, then combined."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.metadata import DecodeMeta, KVLayer, PrefillMeta
from vlm_serve.kernels.paged_attention import FIXED_PART
from vlm_serve.kernels.paged_attention.tiles_triton import (
    attend,
    attention_arguments,
    decode_tile,
    prefill_tile,
)
from vlm_serve.kernels.triton_support import (
    decode_tables,
    launch,
    once,
    power_of_two,
    prefill_tables,
    query_tiles,
    to_device,
)

# About two programs per multiprocessor of an H100; more only adds partial sums.
WANTED_PROGRAMS = 256
MAX_SPLITS = 64
KEYS_WORTH_A_SPLIT = 256
__all__ = ["attention_decode", "attention_prefill"]


@triton.jit
def _gated(values, gate, mask, GATED: tl.constexpr):
    """Multiply rounded values by the sigmoids of a gate, if there is one, as `times_sigmoid`."""
    if GATED:
        gates = tl.load(gate, mask=mask, other=0.0).to(tl.float32)
        values = (values.to(tl.float32) / (1.0 + tl.exp(-gates))).to(values.dtype)
    return values


# The table's stride is the longest sequence's number of blocks, and splits depend on it too:
# specialising on them would recompile the kernels while serving.
@triton.jit(do_not_specialize=["table_stride", "tokens_per_table", "splits"])
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
    tokens_per_table,
    splits,
    gate,
    gate_stride,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
    GATED: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    """Attend to one split of a sequence's keys from the query heads of one key head.

    PART: its keys, whatever the number of splits; 0: as many as this number gives it. HIDDEN: the
    number of first keys that no query sees, fewer than a tile has.
    """
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    length = tl.load(kv_lens + sequence)
    part = PART if PART else tl.cdiv(tl.cdiv(length, splits), KEY_TILE) * KEY_TILE
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
    table = block_tables + token // tokens_per_table * table_stride
    # Whole tiles, then the rest of the last one; an empty split has neither.
    whole = first_key + tl.maximum(last_key - first_key, 0) // KEY_TILE * KEY_TILE
    if HIDDEN:
        # All tiles of the first split are masked, since the first of them must be.
        whole = tl.where(split == 0, first_key, whole)
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
        HIDDEN,
    )
    if splits == 1 and PART == 0:
        places = (token * HEADS + heads)[:, None] * DIM + dims[None, :]
        result = total / norm[:, None]
        own = gate + token * gate_stride + heads[:, None] * DIM + dims[None, :]
        result = _gated(result.to(out.dtype.element_ty), own, inside, GATED)
        tl.store(out + places, result, mask=inside)
    else:
        rows = (token * HEADS + heads) * splits + split
        tl.store(best_parts + rows, best * score_scale, mask=members < GROUP)
        tl.store(norm_parts + rows, norm, mask=members < GROUP)
        tl.store(total_parts + rows[:, None] * DIM + dims[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    best_parts,
    norm_parts,
    total_parts,
    out,
    splits,
    gate,
    gate_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    MOST: tl.constexpr,
    GATED: tl.constexpr,
):
    """Combine the splits of one query head and sequence, each rescaled to the largest score."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, MOST)
    parts = row * splits + index
    real = index < splits
    dims = tl.arange(0, BLOCK_DIM)
    inside = dims < DIM
    # Scores are exponents of two; a split without keys has a best of -inf and no weight.
    best = tl.load(best_parts + parts, mask=real, other=float("-inf"))
    weights = tl.exp2(best - tl.max(best, axis=0))
    norm = tl.sum(tl.load(norm_parts + parts, mask=real, other=0.0) * weights, axis=0)
    places = parts[:, None] * DIM + dims[None, :]
    mask = real[:, None] & inside[None, :]
    totals = tl.load(total_parts + places, mask=mask, other=0.0)
    result = tl.sum(totals * weights[:, None], axis=0) / norm
    own = gate + row // HEADS * gate_stride + row % HEADS * DIM + dims
    result = _gated(result.to(out.dtype.element_ty), own, inside, GATED)
    tl.store(out + row * DIM + dims, result, mask=inside)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    best_parts,
    norm_parts,
    total_parts,
    kv_lens,
    out,
    splits,
    gate,
    gate_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PART: tl.constexpr,
    GATED: tl.constexpr,
):
    """Merge the fixed parts of one query head and sequence, in their order: only those it
    has count, however many there are room for."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_DIM)
    inside = dims < DIM
    first = row * splits
    best = tl.load(best_parts + first)
    norm = tl.load(norm_parts + first)
    total = tl.load(total_parts + first * DIM + dims, mask=inside, other=0.0)
    for part in range(1, tl.cdiv(tl.load(kv_lens + row // HEADS), PART)):
        own = tl.load(best_parts + first + part)
        larger = tl.maximum(best, own)
        shrink = tl.exp2(best - larger)
        weight = tl.exp2(own - larger)
        norm = norm * shrink + tl.load(norm_parts + first + part) * weight
        places = (first + part) * DIM + dims
        added = tl.load(total_parts + places, mask=inside, other=0.0)
        total = total * shrink + added * weight
        best = larger
    own = gate + row // HEADS * gate_stride + row % HEADS * DIM + dims
    result = _gated((total / norm).to(out.dtype.element_ty), own, inside, GATED)
    tl.store(out + row * DIM + dims, result, mask=inside)


def split_count(programs: int, longest: int) -> int:
    """Return the number of splits per sequence, a power of two.

    It is large enough to fill the device. Splits stay so long that their combination costs less
    than the parallelism gains.
    """
    wanted = min(-(-WANTED_PROGRAMS // programs), -(-longest // KEYS_WORTH_A_SPLIT), MAX_SPLITS)
    return power_of_two(wanted)


def attention_decode(
    q: torch.Tensor,
    kv: KVLayer,
    meta: DecodeMeta,
    gate: torch.Tensor | None = None,
    *,
    scale: float,
    deterministic: bool,
    first_key: int = 0,
) -> torch.Tensor:
    """Attend in enough splits for the device; with `deterministic`, in splits of fixed bounds."""
    tables = decode_tables(meta, q.device)
    batch, heads, dim = q.shape
    kv_heads = kv.k.shape[2]
    tile = decode_tile(q.dtype, dim, heads // kv_heads)
    # The host's lengths: under a CUDA graph, the longest that it may replay on.
    longest, part = max(meta.kv_lens), FIXED_PART if deterministic else 0
    splits = -(-longest // part) if part else split_count(batch * kv_heads, longest)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    parts = {
        # `fixed_part_bytes` counts them.
        "best_parts": torch.empty(batch, heads, splits, device=q.device),
        "norm_parts": torch.empty(batch, heads, splits, device=q.device),
        "total_parts": torch.empty(batch, heads, splits, dim, device=q.device),
    }
    after = {
        # Any pointer takes the place of a gate, and is never read.
        "gate": q if gate is None else gate,
        "gate_stride": 0 if gate is None else gate.stride(0),
        "GATED": gate is not None,
    }
    arguments = {
        "out": out,
        **parts,
        **after,
        "kv_lens": tables["kv_lens"],
        **attention_arguments(q, kv, tables, scale, tile),
        "tokens_per_table": batch // max(1, len(tables["block_tables"])),
        "splits": splits,
        "PART": part,
        "HIDDEN": first_key,
    }
    grid = (splits, kv_heads, batch)
    launch(_decode_kernel, grid, arguments, num_warps=tile.warps, num_stages=tile.stages)
    shape = {"HEADS": heads, "DIM": dim, "BLOCK_DIM": power_of_two(dim), "splits": splits, **after}
    if part:
        fixed = {"kv_lens": tables["kv_lens"], "PART": part}
        merged = {**parts, "out": out, **shape, **fixed}
        launch(_merge_kernel, (batch * heads,), merged, num_warps=4)
    elif splits > 1:
        combined = {**parts, "out": out, **shape, "MOST": MAX_SPLITS}
        launch(_combine_kernel, (batch * heads,), combined, num_warps=4)
    return out


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    q,
    out,
    tile_sequence,
    tile_row,
    cu_seqlens,
    starts,
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
    FORM: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend from query rows of one sequence and key head.

    Row r is token r // GROUP, head r % GROUP. So few new tokens still fill a tile, and each key is
    read once for all heads that share it.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.load(tile_sequence + tile)
    begin = tl.load(cu_seqlens + sequence)
    start = tl.load(starts + sequence)
    tokens_in_slice = tl.load(cu_seqlens + sequence + 1) - begin
    first_row = tl.load(tile_row + tile)
    rows = first_row + tl.arange(0, ROWS)
    real = rows < tokens_in_slice * GROUP
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    # Rows past the slice compute finite values and are not stored.
    positions = start + tl.where(real, token, 0)
    dims = tl.arange(0, BLOCK_DIM)
    inside = real[:, None] & (dims < DIM)[None, :]
    q_rows = (begin + token).to(tl.int64) * q_token_stride + head * q_head_stride
    queries = tl.load(q + q_rows[:, None] + dims[None, :], mask=inside, other=0.0).to(DOT)

    last_token = tl.minimum((first_row + ROWS - 1) // GROUP, tokens_in_slice - 1)
    length = start + last_token + 1
    # Keys visible to every row come first, without masks.
    common = (start + first_row // GROUP + 1) // KEY_TILE * KEY_TILE
    table = block_tables + sequence * table_stride
    _best, norm, total = attend(
        queries,
        positions,
        (0, common, length),
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
    result = total / norm[:, None]
    places = ((begin + token).to(tl.int64) * HEADS + head)[:, None] * DIM + dims[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)


def attention_prefill(
    q: torch.Tensor, kv: KVLayer, meta: PrefillMeta, *, scale: float, deterministic: bool
) -> torch.Tensor:
    """Attend with the same bits whether `deterministic` or not.

    Keys are read in tiles at absolute positions. Tile shapes depend on dtypes and head dims only,
    and a row's arithmetic on its own query and keys.
    """
    tables = prefill_tables(meta, q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kv_heads = kv.k.shape[2]
    group = q.shape[1] // kv_heads
    tile = prefill_tile(q.dtype, q.shape[2], kv.k_scale is not None)
    names = f"tile_sequence/{tile.rows}/{group}", f"tile_row/{tile.rows}/{group}"
    once(
        meta.tensors,
        names[0],
        lambda: to_device(
            dict(zip(names, query_tiles(meta, tile.rows, group), strict=True)), q.device
        ),
    )
    arguments = {
        "out": out,
        "tile_sequence": tables[names[0]],
        "tile_row": tables[names[1]],
        "cu_seqlens": tables["cu_seqlens"],
        "starts": tables["starts"],
        **attention_arguments(q, kv, tables, scale, tile),
    }
    grid = (tables[names[0]].shape[0], kv_heads)
    launch(_prefill_kernel, grid, arguments, num_warps=tile.warps, num_stages=tile.stages)
    return out
