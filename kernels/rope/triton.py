"""Query/key norm and partial rotation on a GPU: both tensors in one launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.kv_quant.triton import PLAIN, store_plain
from vlm_serve.kernels.rope.reference import Rotation
from vlm_serve.kernels.triton_support import launch, power_of_two

BLOCK_HEADS = 4
"""Heads of a program."""
_PLAIN = tl.constexpr(PLAIN.value)


@triton.jit
def norm_rotate(
    x,
    out,
    weight,
    cos,
    sin,
    head_stride,
    out_head_stride,
    first_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    FORM: tl.constexpr,
    eps,
):
    """Normalise and rotate some heads of one token; x and out point at the token.

    weight: of the norm; None: they have none.
    FORM: how out stores them, after they are rounded to the dtype of x; not INT8.

    The rotated dims are loaded as two halves, so a rotation needs no exchange between threads.
    """
    heads = first_head + tl.arange(0, BLOCK_HEADS)
    pairs = tl.arange(0, BLOCK_HALF)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    head_inside = (heads < HEADS)[:, None]
    pair_mask = head_inside & (pairs < HALF)[None, :]
    rest_mask = head_inside & (rest < DIM)[None, :]
    row = heads[:, None] * head_stride
    first = tl.load(x + row + pairs[None, :], mask=pair_mask, other=0.0).to(tl.float32)
    second = tl.load(x + row + HALF + pairs[None, :], mask=pair_mask, other=0.0).to(tl.float32)
    other = tl.load(x + row + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(first * first + second * second, axis=1) + tl.sum(other * other, axis=1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        first_weight = tl.load(weight + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + HALF + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
        rest_weight = tl.load(weight + rest, mask=rest < DIM, other=0.0).to(tl.float32)
        first = first * scale * (1.0 + first_weight)[None, :]
        second = second * scale * (1.0 + second_weight)[None, :]
        other = other * scale * (1.0 + rest_weight)[None, :]
    c = tl.load(cos + pairs, mask=pairs < HALF, other=0.0)[None, :]
    s = tl.load(sin + pairs, mask=pairs < HALF, other=0.0)[None, :]
    dtype = x.dtype.element_ty
    out_row = heads[:, None] * out_head_stride
    turned = (first * c - second * s).to(dtype)
    store_plain(out, out_row + pairs[None, :], turned, pair_mask, FORM)
    turned = (second * c + first * s).to(dtype)
    store_plain(out, out_row + HALF + pairs[None, :], turned, pair_mask, FORM)
    store_plain(out, out_row + rest[None, :], other.to(dtype), rest_mask, FORM)


@triton.jit
def _qk_kernel(
    q,
    k,
    q_out,
    k_out,
    q_weight,
    k_weight,
    cos,
    sin,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    angle_stride,
    eps,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups: tl.constexpr = (Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
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
        norm_rotate(
            k + token * k_token_stride,
            k_out + token * K_HEADS * DIM,
            k_weight,
            cos,
            sin,
            k_head_stride,
            DIM,
            (group - q_groups) * BLOCK_HEADS,
            K_HEADS,
            DIM,
            HALF,
            BLOCK_HEADS,
            BLOCK_HALF,
            BLOCK_REST,
            _PLAIN,
            eps,
        )


def qk_norm_rope(
    q: torch.Tensor, k: torch.Tensor, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    arguments = {
        **qk_arguments(q, k, rotation),
        "q_out": q_out,
        "k_out": k_out,
    }
    groups = triton.cdiv(q.shape[1], BLOCK_HEADS) + triton.cdiv(k.shape[1], BLOCK_HEADS)
    launch(_qk_kernel, (q.shape[0], groups), arguments, num_warps=2)
    return q_out, k_out


def qk_arguments(q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> dict[str, Any]:
    """Return the arguments that kernels with this norm and rotation share, by parameter name."""
    dim, half = q.shape[2], rotation.cos.shape[1]
    return {
        "q": q,
        "k": k,
        **rotation._asdict(),
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "k_token_stride": k.stride(0),
        "k_head_stride": k.stride(1),
        "angle_stride": rotation.cos.stride(0),
        "Q_HEADS": q.shape[1],
        "K_HEADS": k.shape[1],
        "DIM": dim,
        "HALF": half,
        "BLOCK_HEADS": BLOCK_HEADS,
        "BLOCK_HALF": power_of_two(half),
        "BLOCK_REST": power_of_two(dim - 2 * half),
    }
