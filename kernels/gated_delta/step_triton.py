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
