"""Attention over paged keys and values on a GPU: packed prefill tiles and split-KV decode."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.metadata import KVLayer, PrefillMeta
from vlm_serve.kernels.paged_attention.decode_triton import attention_decode
from vlm_serve.kernels.paged_attention.tiles_triton import (
    attend,
    attention_arguments,
    prefill_tile,
)
from vlm_serve.kernels.triton_support import (
    launch,
    once,
    prefill_tables,
    query_tiles,
    to_device,
)

__all__ = ["attention_decode", "attention_prefill"]


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
