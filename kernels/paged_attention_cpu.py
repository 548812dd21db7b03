"""Attention over paged keys and values, torch CPU path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from vlm_serve.kernels.kv_quant import dequantise
from vlm_serve.kernels.metadata import DecodeMeta, KVLayer, PrefillMeta


def attention_prefill(
    q: torch.Tensor, kv: KVLayer, meta: PrefillMeta, *, scale: float, deterministic: bool
) -> torch.Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for i in range(len(meta)):
        begin, end = meta.cu_seqlens[i], meta.cu_seqlens[i + 1]
        if begin == end:
            continue
        start = meta.starts[i]
        length = start + end - begin
        keys, values = gather(kv, meta.block_tables[i], length, q.dtype)
        mask = torch.ones(end - begin, length, dtype=torch.bool).tril(start) if start else None
        out[begin:end] = _attend(q[begin:end], keys, values, mask, scale)
    return out


def attention_decode(
    q: torch.Tensor, kv: KVLayer, meta: DecodeMeta, *, scale: float
) -> torch.Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for i, length in enumerate(meta.kv_lens):
        keys, values = gather(kv, meta.block_tables[i], length, q.dtype)
        mask = torch.ones(1, length, dtype=torch.bool)
        out[i : i + 1] = _attend(q[i : i + 1], keys, values, mask, scale)
    return out


def gather(
    kv: KVLayer, table: Sequence[int], length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one sequence as stored, `[length, Hkv, D]` each, in the queries' dtype."""
    index = torch.tensor(table, dtype=torch.int64)
    return (
        _gather(kv.k, kv.k_scale, kv.k_zero, index, dtype)[:length],
        _gather(kv.v, kv.v_scale, kv.v_zero, index, dtype)[:length],
    )


def _gather(
    pages: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    index: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    if scale is not None and zero is not None:
        picked = dequantise(pages[index], scale[index], zero[index], dtype)
    elif pages.dtype == torch.float8_e4m3fn:
        picked = pages.view(torch.uint8)[index].view(pages.dtype).to(dtype)
    else:
        picked = pages[index].to(dtype)
    return picked.flatten(0, 1)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
