"""Gated delta rule, compiled CPU path: token by token, with the state in the cache.

That costs no more arithmetic than chunks and needs no triangular solve. A token's bits depend on
its own sequence alone, however its prompt is cut into chunks.
"""

from __future__ import annotations

import ctypes

import torch

from vlm_serve.kernels.gated_delta.reference import Tokens
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta
from vlm_serve.kernels.native_layout import constant, struct
from vlm_serve.kernels.native_library import call
from vlm_serve.kernels.native_records import DTYPES, LANES, bits, packed

STATE_TYPES = {torch.float32: constant("FLOAT32"), torch.bfloat16: constant("BFLOAT16")}
"""Dtypes of state pools; states are rounded to them after every token."""

_Delta = struct("Delta")
_Gates = struct("Gates")


def gates(
    raw: torch.Tensor,
    neg_decay: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if raw.dtype not in DTYPES:
        return None
    neg_decay, dt_bias = neg_decay.contiguous(), dt_bias.contiguous()
    tokens, heads = raw.shape[0], neg_decay.shape[0]
    beta, decay = torch.empty(tokens, heads), torch.empty(tokens, heads)
    job = _Gates(
        tokens=tokens,
        heads=heads,
        stride=raw.stride(0),
        threads=torch.get_num_threads(),
        raw=raw.data_ptr(),
        neg_decay=neg_decay.data_ptr(),
        dt_bias=dt_bias.data_ptr(),
        beta=beta.data_ptr(),
        decay=decay.data_ptr(),
    )
    call("vlm_gates", ctypes.byref(job), bits(raw))
    return beta, decay


def gated_delta(
    tokens: Tokens, state: torch.Tensor, meta: PrefillMeta | DecodeMeta
) -> torch.Tensor | None:
    """Step through prefill and decode alike: a decode token is a slice of one."""
    q, k, v, g, beta, skip = tokens
    whole = q.shape[2] % LANES == 0 and v.shape[2] % LANES == 0
    if not whole or q.dtype not in DTYPES or state.dtype not in STATE_TYPES:
        return None
    out = torch.empty(v.shape, dtype=v.dtype)
    g, beta = g.contiguous(), beta.float().contiguous()
    skip = None if skip is None else skip.contiguous()
    job = _Delta(
        packed=packed(meta),
        key_heads=q.shape[1],
        value_heads=v.shape[1],
        key_dim=q.shape[2],
        value_dim=v.shape[2],
        q_stride=q.stride(0),
        q_head=q.stride(1),
        k_stride=k.stride(0),
        k_head=k.stride(1),
        v_stride=v.stride(0),
        v_head=v.stride(1),
        state_row_stride=state.stride(0),
        state_type=STATE_TYPES[state.dtype],
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        g=g.data_ptr(),
        beta=beta.data_ptr(),
        skip=None if skip is None else skip.data_ptr(),
        states=state.data_ptr(),
        out=out.data_ptr(),
    )
    call("vlm_gated_delta", ctypes.byref(job), bits(q))
    return out
