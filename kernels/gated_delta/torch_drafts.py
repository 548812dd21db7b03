"""Gated delta rule over drafted tokens, torch path for every device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from vlm_serve.kernels.gated_delta.tokens import Tokens
from vlm_serve.kernels.gated_delta.torch_cpu import unit_keys_and_queries
from vlm_serve.kernels.metadata import Updates, VerifyMeta


def verify_gated_delta(
    tokens: Tokens, state: torch.Tensor, updates: Updates, meta: VerifyMeta
) -> torch.Tensor:
    q, k, v, g, beta = tokens
    fold_gated_delta(state, updates, [fold for fold in meta.folds if fold[2]])
    # The same statements as in recurrent_gated_delta, so that every token gets the same bits.
    kq = unit_keys_and_queries(q, k, v.shape[1])
    decay, beta = g.exp().unsqueeze(-1), beta.unsqueeze(-1)
    change, strength = v * beta.float(), decay * beta
    seen = torch.empty(*v.shape[:2], 2, v.shape[2], device=v.device)
    from_key, from_query = seen.unbind(2)
    keys, decays = kq[:, :, 0].unsqueeze(-1), decay.unsqueeze(-1)
    slices = list(pairwise(meta.cu_seqlens))
    for row, (begin, end) in zip(meta.rows, slices, strict=True):
        current = state[row].float()
        for t in range(begin, end):
            torch.bmm(kq[t], current, out=seen[t])
            own = change[t].addcmul_(from_key[t], strength[t], value=-1.0)
            if t + 1 < end:
                current = _updated(current, decays[t], keys[t], own, state.dtype)
    shared = v.shape[1] // k.shape[1]
    for first, (begin, end) in zip(meta.updates, slices, strict=True):
        entries = slice(first, first + end - begin)
        updates.keys[entries] = kq[begin:end, ::shared, 0]
        updates.changes[entries] = change[begin:end]
        updates.decays[entries] = decay[begin:end, :, 0]
    overlap = kq.prod(2).sum(-1, keepdim=True)
    return change.mul_(overlap).addcmul_(from_query, decay).to(v.dtype)


def fold_gated_delta(
    state: torch.Tensor, updates: Updates, folds: Sequence[tuple[int, int, int]]
) -> None:
    shared = state.shape[1] // updates.keys.shape[1]
    for row, first, count in folds:
        current = state[row].float()
        for entry in range(first, first + count):
            keys = updates.keys[entry].repeat_interleave(shared, dim=0).unsqueeze(-1)
            decay = updates.decays[entry][:, None, None]
            current = _updated(current, decay, keys, updates.changes[entry], state.dtype)
        state[row].copy_(current)


def _updated(
    current: torch.Tensor,
    decay: torch.Tensor,
    keys: torch.Tensor,
    change: torch.Tensor,
    stored: torch.dtype,
) -> torch.Tensor:
    """Return the state after a token, rounded as a pool of the dtype `stored` would hold it."""
    new = torch.mul(current, decay).addcmul_(keys, change.unsqueeze(1))
    return new if stored == torch.float32 else new.to(stored).float()
