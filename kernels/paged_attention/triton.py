"""Attention over paged keys and values on a GPU: prefill tiles and decode tokens, in fixed parts of
keys that are attended in parallel, then merged."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.metadata import DecodeMeta, KVLayer, PrefillMeta
from vlm_serve.kernels.paged_attention import FIXED_PART, SumsRoom, sums_room
from vlm_serve.kernels.paged_attention.parts_triton import (
    attend_parts,
    load_sums,
    merged,
    store_result,
    tile_at,
)
from vlm_serve.kernels.paged_attention.tiles_triton import (
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

PROGRAMS = 1024
"""Programs of a decode step, at most: some for each multiprocessor. Each takes pairs of a token and
a part in turn, so that a graph of many tokens and long contexts has few without work."""
MERGED_ROWS = 8
"""Rows that are merged at a time: their totals leave registers for those of several parts."""
PARTS_AT_ONCE = 8
"""Parts whose sums are read at a time."""
FOUND_TOKENS = 256
"""Tokens whose parts a program counts at a time."""
__all__ = ["attention_decode", "attention_prefill"]


@triton.jit
def _find(kv_lens, count, wanted, most, PART: tl.constexpr, TOKENS: tl.constexpr):
    """Find a decode token's program in the list of all tokens' ones: (token, its program, length
    of the list)."""
    listed = 0
    before = 0
    token = 0
    for first in range(0, count, TOKENS):
        index = first + tl.arange(0, TOKENS)
        lengths = tl.load(kv_lens + index, mask=index < count, other=0)
        programs = tl.minimum(tl.cdiv(lengths, PART), most)
        ends = listed + tl.cumsum(programs, axis=0)
        passed = (ends <= wanted) & (index < count)
        token += tl.sum(passed.to(tl.int32), axis=0)
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), axis=0))
        listed += tl.sum(programs, axis=0)
    return token, wanted - before, listed


# The table's stride is the longest sequence's number of blocks, and the rest depends on a step's
# tokens and lengths: specialising on them would recompile the kernels while serving.
@triton.jit(do_not_specialize=["table_stride", "tokens_per_table", "count", "most", "slots"])
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
    count,
    most,
    slots,
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
    STORED: tl.constexpr,
    MERGED: tl.constexpr,
    GATED: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Attend from the query heads of one key head of each of `count` tokens; `most`, `slots`: see
    `SumsRoom`."""
    KEY_HEADS: tl.constexpr = HEADS // GROUP
    _token, _place, listed = _find(kv_lens, count, 0, most, PART, TOKENS)
    for program in range(tl.program_id(0), listed * KEY_HEADS, tl.num_programs(0)):
        kv_head = program % KEY_HEADS
        token, place, _listed = _find(kv_lens, count, program // KEY_HEADS, most, PART, TOKENS)
        attend_parts(
            (q, q_token_stride, q_head_stride),
            (out, gate, gate_stride),
            (best_parts, norm_parts, total_parts),
            (kv_lens,),
            (token, kv_head, place, most, slots),
            (block_tables, table_stride, tokens_per_table),
            (k_pages, v_pages, k_scales, k_zeros, v_scales, v_zeros),
            (page_block_stride, page_slot_stride, page_head_stride),
            (scale_block_stride, scale_slot_stride, scale_head_stride),
            block_size,
            score_scale,
            GROUP,
            HEADS,
            DIM,
            BLOCK_DIM,
            ROWS,
            KEY_TILE,
            ONE_BLOCK,
            FORM,
            DOT,
            PRECISION,
            PART,
            STORED,
            MERGED,
            GATED,
            HIDDEN,
        )


@triton.jit(do_not_specialize=["table_stride", "tiles", "most", "slots"])
def _prefill_kernel(
    q,
    out,
    best_parts,
    norm_parts,
    total_parts,
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
    tiles,
    most,
    slots,
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
    STORED: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Attend from a tile of one sequence and key head to some parts; first of all those that have
    the most, and last those that a tile does not have."""
    KEY_HEADS: tl.constexpr = HEADS // GROUP
    kv_head = tl.program_id(0) % KEY_HEADS
    index = tl.program_id(0) // KEY_HEADS
    tile = index % tiles
    place = index // tiles
    attend_parts(
        (q, q_token_stride, q_head_stride),
        (out, out, 0),
        (best_parts, norm_parts, total_parts),
        (tile_sequence, tile_row, cu_seqlens, starts),
        (tile, kv_head, place, most, slots),
        (block_tables, table_stride, 1),
        (k_pages, v_pages, k_scales, k_zeros, v_scales, v_zeros),
        (page_block_stride, page_slot_stride, page_head_stride),
        (scale_block_stride, scale_slot_stride, scale_head_stride),
        block_size,
        score_scale,
        GROUP,
        HEADS,
        DIM,
        BLOCK_DIM,
        ROWS,
        KEY_TILE,
        ONE_BLOCK,
        FORM,
        DOT,
        PRECISION,
        PART,
        STORED,
        MERGED,
        False,
        0,
    )


@triton.jit(do_not_specialize=["most", "slots"])
def _merge_kernel(
    out,
    best_parts,
    norm_parts,
    total_parts,
    tables,
    most,
    slots,
    gate,
    gate_stride,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    STORED: tl.constexpr,
    MERGED: tl.constexpr,
    GATED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Merge the sums of some rows of a tile and key head, in the order of its parts: only those
    that it has count, however many there are room for. `tables`: see `tile_at`."""
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    tile, _sequence, length = tile_at(index, tables, ROWS, GROUP)
    _begin, tokens, _start, first_row = tile
    if length > PART:
        chosen = tl.program_id(2) * MERGED + tl.arange(0, MERGED)
        known = (chosen < STORED) & (first_row + chosen < tokens * GROUP)
        parts = tl.minimum(tl.cdiv(length, PART), most)
        sums = (best_parts, norm_parts, total_parts)
        best = tl.full((MERGED,), float("-inf"), tl.float32)
        norm = tl.zeros((MERGED,), tl.float32)
        total = tl.zeros((MERGED, BLOCK_DIM), tl.float32)
        for first in range(0, parts, AT_ONCE):
            for part in tl.static_range(AT_ONCE):
                slot = (index.to(tl.int64) * slots + first + part) * (HEADS // GROUP) + kv_head
                there = known & (first + part < parts)
                own = load_sums(sums, slot * STORED + chosen, there, DIM, BLOCK_DIM)
                best, norm, total = merged((best, norm, total), own)
        rows, results = first_row + chosen, (out, gate, gate_stride)
        sums = (best, norm, total)
        store_result(results, tile, kv_head, rows, sums, GROUP, HEADS, DIM, GATED)


def _sums(tiles: int, room: SumsRoom, rows: int, dim: int, device: torch.device) -> dict[str, Any]:
    """Return the arguments of both kernels that say where sums are kept; `rows` of a tile, those of
    all key heads."""
    shape = (tiles, room.slots, rows) if room.slots > 1 else (1,)
    return {
        # `sums_bytes` counts them.
        "best_parts": torch.empty(shape, device=device),
        "norm_parts": torch.empty(shape, device=device),
        "total_parts": torch.empty((*shape, dim), device=device),
        "most": room.most,
        "slots": room.slots,
    }


def _launch_merge(
    tiles: int, arguments: dict[str, Any], tables: tuple[torch.Tensor, ...], gated: dict[str, Any]
) -> None:
    """Merge the sums of `tiles` tiles, which `arguments` of an attention kernel describe."""
    own = ("out", "best_parts", "norm_parts", "total_parts", "most", "slots")
    sizes = ("GROUP", "HEADS", "DIM", "BLOCK_DIM", "ROWS", "PART", "STORED", "MERGED")
    merging = {
        **{name: arguments[name] for name in (*own, *sizes)},
        **gated,
        "tables": tables,
        "AT_ONCE": PARTS_AT_ONCE,
    }
    stored, at_a_time = arguments["STORED"], arguments["MERGED"]
    grid = (tiles, arguments["HEADS"] // arguments["GROUP"], triton.cdiv(stored, at_a_time))
    launch(_merge_kernel, grid, merging, num_warps=4)


def _gate(gate: torch.Tensor | None, instead: torch.Tensor) -> dict[str, Any]:
    # Any pointer takes the place of a gate, and is never read.
    return {
        "gate": instead if gate is None else gate,
        "gate_stride": 0 if gate is None else gate.stride(0),
        "GATED": gate is not None,
    }


def attention_decode(
    q: torch.Tensor,
    kv: KVLayer,
    meta: DecodeMeta,
    gate: torch.Tensor | None = None,
    *,
    scale: float,
    first_key: int = 0,
) -> torch.Tensor:
    tables = decode_tables(meta, q.device)
    batch, heads, dim = q.shape
    kv_heads = kv.k.shape[2]
    group = heads // kv_heads
    tile = decode_tile(q.dtype, dim, group)
    # The host's lengths: under a CUDA graph, the longest that it may replay on.
    room = sums_room(batch, heads, dim, max(meta.kv_lens), FIXED_PART)
    gated = _gate(gate, q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    arguments = {
        "out": out,
        **_sums(batch, room, heads, dim, q.device),
        **gated,
        "kv_lens": tables["kv_lens"],
        **attention_arguments(q, kv, tables, scale, tile),
        "tokens_per_table": batch // max(1, len(tables["block_tables"])),
        "count": batch,
        "PART": FIXED_PART,
        "STORED": group,
        "MERGED": power_of_two(min(group, MERGED_ROWS)),
        "HIDDEN": first_key,
        "TOKENS": FOUND_TOKENS,
    }
    grid = (min(batch * room.most * kv_heads, PROGRAMS),)
    launch(_decode_kernel, grid, arguments, num_warps=tile.warps, num_stages=tile.stages)
    if room.slots > 1:
        _launch_merge(batch, arguments, (tables["kv_lens"],), gated)
    return out


def attention_prefill(
    q: torch.Tensor, kv: KVLayer, meta: PrefillMeta, *, scale: float
) -> torch.Tensor:
    """Attend in tiles at absolute positions. Their shapes depend on dtypes and head dims only, and
    a row's arithmetic on its own query and keys."""
    tables = prefill_tables(meta, q.device)
    heads, dim = q.shape[1:]
    group = heads // kv.k.shape[2]
    tile = prefill_tile(q.dtype, dim, kv.k_scale is not None)
    names = f"tile_sequence/{tile.rows}/{group}", f"tile_row/{tile.rows}/{group}"
    once(
        meta.tensors,
        names[0],
        lambda: to_device(
            dict(zip(names, query_tiles(meta, tile.rows, group), strict=True)), q.device
        ),
    )
    # In a graph starts change between replays, but blocks are no more than its table has room for.
    longest = tables["block_tables"].shape[1] * kv.k.shape[1] if meta.fixed else max(meta.kv_lens)
    tiles, rows = tables[names[0]].shape[0], tile.rows * kv.k.shape[2]
    room = sums_room(tiles, rows, dim, longest, FIXED_PART)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    arguments = {
        "out": out,
        **_sums(room.tiles, room, rows, dim, q.device),
        "cu_seqlens": tables["cu_seqlens"],
        "starts": tables["starts"],
        **attention_arguments(q, kv, tables, scale, tile),
        "PART": FIXED_PART,
        "STORED": tile.rows,
        "MERGED": MERGED_ROWS,
    }
    for first in range(0, tiles, room.tiles):
        some = [tables[name][first : first + room.tiles] for name in names]
        count = len(some[0])
        own = {**arguments, "tile_sequence": some[0], "tile_row": some[1], "tiles": count}
        grid = (count * room.most * kv.k.shape[2],)
        launch(_prefill_kernel, grid, own, num_warps=tile.warps, num_stages=tile.stages)
        if room.slots > 1:
            own_tables = (*some, tables["cu_seqlens"], tables["starts"])
            _launch_merge(count, own, own_tables, _gate(None, q))
    return out
