"""Gated delta rule over packed sequences, with recurrent states kept in rows of a pool.

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - k_t^T exp(g_t) S_{t-1})^T,    o_t = S_t^T q_t

with q and k normalised to unit length and q scaled by `Dk ** -0.5` (Yang, Kautz, Hatamizadeh 2024,
"Gated Delta Networks"; transformers' torch_chunk_gated_delta_rule and
torch_recurrent_gated_delta_rule). Each key head serves `Hv / Hk` consecutive value heads.
Everything inside is float32.

With factors `skip` the recurrence is that of Mamba2 (Dao, Gu 2024, "Transformers are SSMs";
transformers' mamba2_chunk_scan and mamba2_selective_state_update), where q is C, k is B and beta
the length of a step:

    S_t = exp(g_t) S_{t-1} + beta_t k_t v_t^T,    o_t = S_t^T q_t + skip v_t
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlm_serve.kernels.checks import (
    FLOAT_DTYPES,
    KernelArgumentError,
    check_meta,
    check_tensor,
)
from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.gated_delta import compiled, reference
from vlm_serve.kernels.gated_delta.reference import Tokens
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta, Updates, VerifyMeta

_TRITON = "vlm_serve.kernels.gated_delta.triton"
_chunk = Op(
    reference.gated_delta,
    compiled=compiled.gated_delta,
    triton=f"{_TRITON}:chunk_gated_delta",
    others={"fla": "vlm_serve.kernels.gated_delta.fla:chunk_gated_delta"},
)
_recurrent = Op(
    reference.gated_delta,
    compiled=compiled.gated_delta,
    triton=f"{_TRITON}:recurrent_gated_delta",
)
_DRAFTS_TRITON = "vlm_serve.kernels.gated_delta.triton"
_verify = Op(reference.verify_gated_delta, triton=f"{_DRAFTS_TRITON}:verify_gated_delta")
_fold = Op(reference.fold_gated_delta, triton=f"{_DRAFTS_TRITON}:fold_gated_delta")
_gates = Op(
    reference.gates,
    compiled=compiled.gates,
    triton="vlm_serve.kernels.gated_delta.decoding_triton:gates",
)

_lengths = Op(
    reference.step_lengths, triton="vlm_serve.kernels.gated_delta.mamba2_triton:step_lengths"
)


def chunk_gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    meta: PrefillMeta,
    *,
    skip: torch.Tensor | None = None,
) -> torch.Tensor:
    """Prefill every slice in the chunks that `meta.chunk_ends` names, each of 1 to 64 tokens.

    Initial states are read straight from the source rows (zero state for -1). Final states go to
    the destination rows, and the states after the chunks in `meta.snapshots` to snapshot rows.

    A run that resumes at a chunk end gives the same bits as the unsplit one, whatever else is in
    the batch: a chunk's arithmetic depends on its own tokens and incoming state alone. To keep
    this true for a pool that is not float32, the state is rounded to the pool's dtype after every
    chunk.

    Args:
        q, k: `[N, Hk, Dk]`, float32, bfloat16 or float16, any strides with a dense last dimension.
        v: `[N, Hv, Dv]`, the dtype of q, likewise; `Hv` a multiple of `Hk`.
        g: `[N, Hv]` float32, log decay (<= 0).
        beta: `[N, Hv]` float, write strength in 0..1, or Mamba2's length of a step.
        state: `[rows, Hv, Dk, Dv]`, float32, bfloat16 or float16, any row stride; written in place.
        meta: the slices.
        skip: `[Hv]` float32 for Mamba2's recurrence; None for the delta rule.

    Returns:
        `[N, Hv, Dv]` in the dtype of v, contiguous.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    tokens = _checked(q, k, v, g, beta, state, skip)
    check_meta(meta, q.shape[0], state.shape[0])
    return _chunk(q.device, tokens, state, meta)


def recurrent_gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    meta: DecodeMeta,
    *,
    skip: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode one token per sequence: one step of the recurrence each.

    Args:
        q, k, v, g, beta, state, skip: as in `chunk_gated_delta`, with B tokens.
        meta: the sequences' rows; a snapshot row also receives the new state.

    Returns:
        `[B, Hv, Dv]` in the dtype of v.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    tokens = _checked(q, k, v, g, beta, state, skip)
    check_meta(meta, q.shape[0], state.shape[0])
    return _recurrent(q.device, tokens, state, meta)


def verify_gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    updates: Updates,
    meta: VerifyMeta,
    *,
    skip: torch.Tensor | None = None,
) -> torch.Tensor:
    """Step the recurrence over drafted tokens; leave updates instead of states.

    Earlier updates are folded into the rows first, as `meta` says. A state is rounded to the pool's
    dtype after every token, as decode steps would.

    Args:
        q, k, v, g, beta, state, skip: as in `chunk_gated_delta`.
        updates: receives keys, changes and decays of the tokens.
        meta: the slices.

    Returns:
        `[N, Hv, Dv]` in the dtype of v.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    tokens = _checked(q, k, v, g, beta, state, skip)
    check_meta(meta, q.shape[0], state.shape[0], updates.decays.shape[0])
    return _verify(q.device, tokens, state, updates, meta)


def fold_gated_delta(
    state: torch.Tensor, updates: Updates, folds: Sequence[tuple[int, int, int]]
) -> None:
    """Fold updates into state rows, in place: (row, first update, count) each."""
    folds = [fold for fold in folds if fold[2]]
    if folds:
        _fold(state.device, state, updates, folds)


def gates(
    raw: torch.Tensor,
    neg_decay: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute write strength `sigmoid(b)` and log decay `neg_decay * softplus(a + dt_bias)`.

    Args:
        raw: `[T, 2 Hv]`, float32, bfloat16 or float16: b and a side by side, any row stride.
        neg_decay, dt_bias: float32 `[Hv]`.
        deterministic: make an element's bits independent of its neighbours.

    Returns:
        (beta, g) for `chunk_gated_delta`, float32 `[T, Hv]` each.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    heads = neg_decay.shape[0]
    check_tensor("raw", raw, (None, 2 * heads), FLOAT_DTYPES, raw.device)
    check_tensor("neg_decay", neg_decay, (heads,), (torch.float32,), raw.device)
    check_tensor("dt_bias", dt_bias, (heads,), (torch.float32,), raw.device)
    return _gates(raw.device, raw, neg_decay, dt_bias, deterministic=deterministic)


def step_lengths(
    raw: torch.Tensor,
    neg_decay: torch.Tensor,
    dt_bias: torch.Tensor,
    limits: tuple[float, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute Mamba2's lengths of steps, `softplus(raw + dt_bias)` within limits, and its log
    decays, `neg_decay` times that. An element's bits depend on it alone.

    Args:
        raw: `[T, Hv]`, float32, bfloat16 or float16, any row stride.
        neg_decay, dt_bias: float32 `[Hv]`.
        limits: the least and the greatest length.

    Returns:
        (beta, g) for `chunk_gated_delta`, float32 `[T, Hv]` each.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    heads = neg_decay.shape[0]
    check_tensor("raw", raw, (None, heads), FLOAT_DTYPES, raw.device)
    check_tensor("neg_decay", neg_decay, (heads,), (torch.float32,), raw.device)
    check_tensor("dt_bias", dt_bias, (heads,), (torch.float32,), raw.device)
    return _lengths(raw.device, raw, neg_decay, dt_bias, *limits)


def _checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    skip: torch.Tensor | None,
) -> Tokens:
    check_tensor("q", q, (None, None, None), FLOAT_DTYPES, q.device)
    check_tensor("k", k, q.shape, (q.dtype,), q.device)
    tokens, key_heads, key_dim = q.shape
    check_tensor("v", v, (tokens, None, None), (q.dtype,), q.device)
    heads, value_dim = v.shape[1:]
    if heads % key_heads:
        raise KernelArgumentError("v", f"{heads} value heads for {key_heads} key heads")
    check_tensor("g", g, (tokens, heads), (torch.float32,), q.device)
    check_tensor("beta", beta, (tokens, heads), FLOAT_DTYPES, q.device)
    check_tensor("state", state, (None, heads, key_dim, value_dim), FLOAT_DTYPES, q.device)
    if not state[:1].is_contiguous():
        raise KernelArgumentError("state", "a row must be contiguous")
    if skip is not None:
        check_tensor("skip", skip, (heads,), (torch.float32,), q.device)
    return Tokens(q, k, v, g, beta, skip)
