"""Attention over paged keys and values by torch, query by query."""

from __future__ import annotations

from itertools import pairwise

import torch

from vlm_serve.kernels.kv_quant import pick
from vlm_serve.kernels.metadata import DecodeMeta, KVLayer, PrefillMeta
from vlm_serve.kernels.plain import widened


def attention(
    q: torch.Tensor,
    kv: KVLayer,
    meta: PrefillMeta | DecodeMeta,
    *,
    scale: float,
    first_key: int = 0,
) -> torch.Tensor:
    """Attend in prefill and decode alike: a decode token is a slice of one."""
    out = torch.empty(q.shape, dtype=q.dtype)
    slices = zip(pairwise(meta.cu_seqlens), meta.kv_lens, meta.block_tables, strict=True)
    for (begin, end), length, table in slices:
        blocks = torch.tensor(list(table[: -(-length // kv.k.shape[1])]), dtype=torch.int64)
        keys, values = (
            pick(*stored, blocks, torch.float32).flatten(0, 1)[first_key:length]
            for stored in kv.halves
        )
        out[begin:end] = attend(q[begin:end], keys, values, scale)
    return out


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend from the last n tokens of a sequence.

    Args:
        q: `[n, Hq, D]`.
        keys, values: `[length, Hkv, D]`; the last query sees all of them.
        scale: factor on the scores.

    Returns:
        `[n, Hq, D]` in the dtype of q.
    """
    out = torch.empty_like(q)
    heads = keys.shape[1], q.shape[1] // keys.shape[1]
    grouped = (widened(q) * scale).reshape(len(q), *heads, q.shape[2])
    keys, values = keys.permute(1, 2, 0), values.transpose(0, 1)
    for place, query in enumerate(grouped):
        seen = keys.shape[2] - len(q) + 1 + place
        weights = torch.softmax(query @ keys[..., :seen], -1)
        out[place] = (weights @ values[:, :seen]).flatten(0, 1)
    return out
