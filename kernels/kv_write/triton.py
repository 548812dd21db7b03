"""Writing keys and values into pages on a GPU, also with norm and rotation in the same launch.

Codes of int8 need a row's extremes before the first of them, so such pages are written by a launch
of their own.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.kv_quant.triton import (
    INT8,
    PLAIN,
    page_arguments,
    quantise_rows,
    store_plain,
    stored_form,
)
from vlm_serve.kernels.metadata import KVLayer
from vlm_serve.kernels.rope.triton import BLOCK_HEADS, norm_rotate, qk_arguments, qk_norm_rope
from vlm_serve.kernels.triton_support import current_target, launch, power_of_two, to_device

if TYPE_CHECKING:
    from vlm_serve.kernels.rope.reference import Rotation

COPY_TILE = 4096
_PLAIN = tl.constexpr(PLAIN.value)


@triton.jit
def _store_rows(
    x, places, inside, stored, page_places, scale_places, heads_inside, FORM: tl.constexpr
):
    """Store rows of keys or values; `stored`: pointers to pages, scales and zero points."""
    pages, scales, zeros = stored
    values = tl.load(x + places, mask=inside, other=0.0)
    if FORM == INT8:
        codes, scale, zero = quantise_rows(values.to(tl.float32))
        tl.store(pages + page_places, codes, mask=inside)
        tl.store(scales + scale_places, scale, mask=heads_inside)
        tl.store(zeros + scale_places, zero, mask=heads_inside)
    else:
        store_plain(pages, page_places, values, inside, FORM)


@triton.jit
def _write_kernel(
    k,
    v,
    slots,
    k_pages,
    v_pages,
    k_scales,
    k_zeros,
    v_scales,
    v_zeros,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    page_block_stride,
    page_slot_stride,
    page_head_stride,
    scale_block_stride,
    scale_slot_stride,
    scale_head_stride,
    block_size,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    FORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        block, offset = slot // block_size, slot % block_size
        heads = tl.arange(0, BLOCK_HEADS)
        dims = tl.arange(0, BLOCK_DIM)
        heads_inside = heads < HEADS
        inside = heads_inside[:, None] & (dims < DIM)[None, :]
        page = block * page_block_stride + offset * page_slot_stride
        page_places = page + heads[:, None] * page_head_stride + dims[None, :]
        scale = block * scale_block_stride + offset * scale_slot_stride
        scale_places = scale + heads * scale_head_stride
        k_places = token * k_token_stride + heads[:, None] * k_head_stride + dims[None, :]
        v_places = token * v_token_stride + heads[:, None] * v_head_stride + dims[None, :]
        stored = (k_pages, k_scales, k_zeros)
        _store_rows(k, k_places, inside, stored, page_places, scale_places, heads_inside, FORM)
        stored = (v_pages, v_scales, v_zeros)
        _store_rows(v, v_places, inside, stored, page_places, scale_places, heads_inside, FORM)


def write_kv(k: torch.Tensor, v: torch.Tensor, kv: KVLayer, slots: torch.Tensor) -> None:
    tokens, heads, dim = k.shape
    block_heads, block_dim = power_of_two(heads), power_of_two(dim)
    arguments = {
        "k": k,
        "v": v,
        "slots": slots,
        **page_arguments(kv),
        "k_token_stride": k.stride(0),
        "k_head_stride": k.stride(1),
        "v_token_stride": v.stride(0),
        "v_head_stride": v.stride(1),
        "HEADS": heads,
        "DIM": dim,
        "BLOCK_HEADS": block_heads,
        "BLOCK_DIM": block_dim,
        "FORM": stored_form(kv, current_target()),
    }
    num_warps = min(8, max(1, block_heads * block_dim // 512))
    launch(_write_kernel, (tokens,), arguments, num_warps=num_warps, fuse=False)


@triton.jit
def _copy_rows_kernel(
    pool,
    copies,
    block_stride,
    part_stride,
    inner_stride,
    row_size,
    INNER: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy a tile of the leading rows of one (copy, layer, part)."""
    part = tl.program_id(1)
    copy = tl.program_id(2)
    src = tl.load(copies + 3 * copy).to(tl.int64)
    dst = tl.load(copies + 3 * copy + 1).to(tl.int64)
    size = tl.load(copies + 3 * copy + 2) * row_size
    inside_block = (part // INNER).to(tl.int64) * part_stride + (part % INNER) * inner_stride
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = places < size
    values = tl.load(pool + src * block_stride + inside_block + places, mask=mask)
    tl.store(pool + dst * block_stride + inside_block + places, values, mask=mask)


def copy_kv_rows(
    kv_pool: torch.Tensor,
    scales: torch.Tensor | None,
    copies: Sequence[tuple[int, int, int]],
) -> None:
    most = max((rows for _, _, rows in copies), default=0)
    if not most:
        return
    table = to_device({"copies": [n for copy in copies for n in copy]}, kv_pool.device)["copies"]
    for name, pool in (("kv_pool", kv_pool), ("scales", scales)):
        if pool is None:
            continue
        if not pool[0, 0, 0].is_contiguous():
            raise KernelArgumentError(name, "a layer's rows of one block must be contiguous")
        layers, parts, size = pool.shape[1:4]
        row_size = pool[0, 0, 0].numel() // size
        tile = min(COPY_TILE, power_of_two(size * row_size))
        arguments = {
            "pool": pool.view(INTEGERS[pool.element_size()]),
            "copies": table,
            "block_stride": pool.stride(0),
            "part_stride": pool.stride(1),
            "inner_stride": pool.stride(2),
            "row_size": row_size,
            "INNER": parts,
            "TILE": tile,
        }
        grid = (triton.cdiv(most * row_size, tile), layers * parts, len(copies))
        launch(_copy_rows_kernel, grid, arguments, num_warps=4)


# Copies move bits: one kernel serves every dtype of a size, and NaNs keep their bits.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _rotate_write_kernel(
    q,
    k,
    v,
    q_out,
    q_weight,
    k_weight,
    cos,
    sin,
    slots,
    k_pages,
    v_pages,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    angle_stride,
    page_block_stride,
    page_slot_stride,
    page_head_stride,
    block_size,
    eps,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    FORM: tl.constexpr,
):
    """Serve a few heads of one token: first queries, then keys, then values."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups: tl.constexpr = (Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    k_groups: tl.constexpr = (K_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    cos += token * angle_stride
    sin += token * angle_stride
    if group < q_groups:
        norm_rotate(
            q + token * q_token_stride,
            q_out + token * Q_HEADS * DIM,
            q_weight,
            cos,
            sin,
            q_head_stride,
            DIM,
            group * BLOCK_HEADS,
            Q_HEADS,
            DIM,
            HALF,
            BLOCK_HEADS,
            BLOCK_HALF,
            BLOCK_REST,
            _PLAIN,
            eps,
        )
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            page = slot // block_size * page_block_stride + slot % block_size * page_slot_stride
            if group < q_groups + k_groups:
                norm_rotate(
                    k + token * k_token_stride,
                    k_pages + page,
                    k_weight,
                    cos,
                    sin,
                    k_head_stride,
                    page_head_stride,
                    (group - q_groups) * BLOCK_HEADS,
                    K_HEADS,
                    DIM,
                    HALF,
                    BLOCK_HEADS,
                    BLOCK_HALF,
                    BLOCK_REST,
                    FORM,
                    eps,
                )
            else:
                heads = (group - q_groups - k_groups) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
                dims = tl.arange(0, BLOCK_DIM)
                inside = (heads < K_HEADS)[:, None] & (dims < DIM)[None, :]
                places = token * v_token_stride + heads[:, None] * v_head_stride + dims[None, :]
                values = tl.load(v + places, mask=inside, other=0.0)
                places = page + heads[:, None] * page_head_stride + dims[None, :]
                store_plain(v_pages, places, values, inside, FORM)


def rotate_and_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotation: Rotation,
    kv: KVLayer,
    slots: torch.Tensor,
) -> torch.Tensor:
    form = stored_form(kv, current_target())
    if form == INT8.value:
        q, k = qk_norm_rope(q, k, rotation)
        write_kv(k, v, kv, slots)
        return q
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    pages = page_arguments(kv)
    names = ("k_pages", "v_pages", "page_block_stride", "page_slot_stride", "page_head_stride")
    arguments = {
        **qk_arguments(q, k, rotation),
        "v": v,
        "q_out": out,
        "slots": slots,
        **{name: pages[name] for name in (*names, "block_size")},
        "v_token_stride": v.stride(0),
        "v_head_stride": v.stride(1),
        "BLOCK_DIM": power_of_two(q.shape[2]),
        "FORM": form,
    }
    groups = triton.cdiv(q.shape[1], BLOCK_HEADS) + 2 * triton.cdiv(k.shape[1], BLOCK_HEADS)
    launch(_rotate_write_kernel, (q.shape[0], groups), arguments, num_warps=2)
    return out
