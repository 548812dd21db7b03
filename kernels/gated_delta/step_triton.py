"""One token of the gated delta rule on a GPU, shared by the decode step and drafted tokens."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.gated_delta.chunk_triton import EPS
from vlm_serve.kernels.gated_delta.tokens import Tokens
from vlm_serve.kernels.triton_support import power_of_two

STEP_COLUMNS = 32
"""Value columns of a state's tile."""


@triton.jit
def step(current, query, key, value, gate, strength, scale):
    """Step the recurrence over one token, for decode and drafts alike.

    Return the state after it (not rounded), the output read from it, and the token's unit key,
    change and decay.
    """
    query *= tl.rsqrt(tl.sum(query * query, axis=0) + EPS) * scale
    key *= tl.rsqrt(tl.sum(key * key, axis=0) + EPS)
    decay = tl.exp(gate)
    current *= decay
    change = (value - tl.sum(current * key[:, None], axis=0)) * strength
    current += key[:, None] * change[None, :]
    result = tl.sum(current * query[:, None], axis=0)
    return current, result, key, change, decay


@triton.jit
def advance(
    sequence,
    head,
    columns,
    q,
    k,
    v,
    g,
    beta,
    state,
    src_rows,
    dst_rows,
    snapshot_rows,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    g_stride,
    beta_stride,
    state_row_stride,
    scale,
    RATIO: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
):
    """Step one token of a sequence and store the state's columns; return the output of the
    columns."""
    token = sequence.to(tl.int64)
    dims = tl.arange(0, BLOCK_KEY)
    inside = dims < KEY_DIM
    inside_columns = columns < VALUE_DIM
    tile_inside = inside[:, None] & inside_columns[None, :]
    tile = head * KEY_DIM * VALUE_DIM + dims[:, None] * VALUE_DIM + columns[None, :]

    current = tl.zeros((BLOCK_KEY, columns.shape[0]), tl.float32)
    src = tl.load(src_rows + sequence).to(tl.int64)
    if src >= 0:
        stored = tl.load(state + src * state_row_stride + tile, mask=tile_inside, other=0.0)
        current = stored.to(tl.float32)
    query_place = q + token * q_token_stride + (head // RATIO) * q_head_stride + dims
    key_place = k + token * k_token_stride + (head // RATIO) * k_head_stride + dims
    value_place = v + token * v_token_stride + head * v_head_stride + columns
    current, result, _key, _change, _decay = step(
        current,
        tl.load(query_place, mask=inside, other=0.0).to(tl.float32),
        tl.load(key_place, mask=inside, other=0.0).to(tl.float32),
        tl.load(value_place, mask=inside_columns, other=0.0).to(tl.float32),
        tl.load(g + token * g_stride + head),
        tl.load(beta + token * beta_stride + head).to(tl.float32),
        scale,
    )
    rounded = current.to(state.dtype.element_ty)
    dst = tl.load(dst_rows + sequence).to(tl.int64)
    tl.store(state + dst * state_row_stride + tile, rounded, mask=tile_inside)
    snapshot = tl.load(snapshot_rows + sequence).to(tl.int64)
    if snapshot >= 0:
        tl.store(state + snapshot * state_row_stride + tile, rounded, mask=tile_inside)
    return result


def step_arguments(tokens: Tokens, state: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
    """Return the arguments that kernels of single steps share, by parameter name."""
    q, k, v, g, beta = tokens
    heads, value_dim = v.shape[1:]
    key_dim = q.shape[2]
    return {
        **tokens._asdict(),
        "state": state,
        "out": out,
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "k_token_stride": k.stride(0),
        "k_head_stride": k.stride(1),
        "v_token_stride": v.stride(0),
        "v_head_stride": v.stride(1),
        "g_stride": g.stride(0),
        "beta_stride": beta.stride(0),
        "state_row_stride": state.stride(0),
        "scale": key_dim**-0.5,
        "RATIO": heads // q.shape[1],
        "HEADS": heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_KEY": power_of_two(key_dim),
        "COLUMNS": STEP_COLUMNS,
    }
