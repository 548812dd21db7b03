"""Norm, rotation and the write of keys and values on a GPU, in one launch.

Codes of int8 need a row's extremes before the first of them, so such pages are written by a launch
of their own.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.kv_quant.triton import (
    INT8,
    PLAIN,
    page_arguments,
    store_plain,
    stored_form,
)
from vlm_serve.kernels.kv_write.triton import write_kv
from vlm_serve.kernels.metadata import KVLayer
from vlm_serve.kernels.rope.triton import BLOCK_HEADS, norm_rotate, qk_arguments, qk_norm_rope
from vlm_serve.kernels.triton_support import current_target, launch, power_of_two

if TYPE_CHECKING:
    from vlm_serve.kernels.kv_write.rotated import Rotation

_PLAIN = tl.constexpr(PLAIN.value)


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
        q, k = qk_norm_rope(q, k, *rotation)
        write_kv(k, v, kv, slots)
        return q
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    pages = page_arguments(kv)
    names = ("k_pages", "v_pages", "page_block_stride", "page_slot_stride", "page_head_stride")
    arguments = {
        **qk_arguments(q, k, *rotation),
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
