"""Attention over paged keys and values, compiled CPU path."""

from __future__ import annotations

import ctypes
from array import array
from typing import cast

import torch

from vlm_serve.kernels.kv_quant.compiled import pages_record
from vlm_serve.kernels.metadata import DecodeMeta, KVLayer, PrefillMeta
from vlm_serve.kernels.native_layout import struct
from vlm_serve.kernels.native_library import call
from vlm_serve.kernels.native_records import LANES, bits, tables

_Attention = struct("Attention")


def attention(
    q: torch.Tensor,
    kv: KVLayer,
    meta: PrefillMeta | DecodeMeta,
    *,
    scale: float,
    first_key: int = 0,
) -> torch.Tensor | None:
    """Attend in prefill and decode alike: a decode token is a slice of one."""
    pages = pages_record(kv, q.dtype)
    if first_key or pages is None or q.shape[2] % LANES:
        return None
    out = torch.empty(q.shape, dtype=q.dtype)
    if "compiled attention" not in meta.plans:
        meta.plans["compiled attention"] = _arrays(meta)
    arrays = cast("tuple[array[int], ...]", meta.plans["compiled attention"])
    addresses = [numbers.buffer_info()[0] for numbers in arrays]
    job = _Attention(
        sequences=len(meta),
        threads=torch.get_num_threads(),
        heads=q.shape[1],
        kv_heads=kv.k.shape[2],
        head_dim=q.shape[2],
        q_stride=q.stride(0),
        q_head=q.stride(1),
        pages=pages,
        scale=scale,
        offsets=addresses[0],
        starts=addresses[1],
        tables=addresses[2],
        q=q.data_ptr(),
        out=out.data_ptr(),
    )
    call("vlm_attention", ctypes.byref(job), bits(q))
    return out


def _arrays(meta: PrefillMeta | DecodeMeta) -> tuple[array[int], ...]:
    """Return offsets, starts and the tables' addresses; then the tables, which must stay alive."""
    places, tables_kept = tables(meta)
    return array("q", meta.cu_seqlens), array("q", meta.starts), places, *tables_kept
