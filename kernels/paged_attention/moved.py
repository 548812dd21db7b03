"""Copies of keys and values without a sequence's first slots, for kernels that begin at slot 0."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from vlm_serve.kernels.kv_quant import pick
from vlm_serve.kernels.metadata import KVLayer, PrefillMeta

_STEP = 64


def without_first(
    kv: KVLayer, meta: PrefillMeta, first: int, dtype: torch.dtype
) -> tuple[KVLayer, PrefillMeta]:
    """Copy keys and values without each sequence's first slots, into one page per sequence.

    Args:
        kv: the layer's pages.
        meta: slices; `starts` count keys, and each table covers `first` slots more.
        first: slots of a table before its first key.
        dtype: of the copy.

    Returns:
        The copied pages, and the slices over them.
    """
    size = kv.k.shape[1]
    lengths = [
        start + end - begin
        for start, (begin, end) in zip(meta.starts, pairwise(meta.cu_seqlens), strict=True)
    ]
    longest = -(-max(lengths) // _STEP) * _STEP
    shape = (len(meta), longest, *kv.k.shape[2:])
    pages = [torch.zeros(shape, dtype=dtype, device=kv.k.device) for _ in range(2)]
    for place, (length, table) in enumerate(zip(lengths, meta.block_tables, strict=True)):
        blocks = torch.tensor(
            list(table[: -(-(length + first) // size)]), dtype=torch.int64, device=kv.k.device
        )
        parts = ((kv.k, kv.k_scale, kv.k_zero), (kv.v, kv.v_scale, kv.v_zero))
        for page, (stored, scale, zero) in zip(pages, parts, strict=True):
            rows = pick(stored, scale, zero, blocks, dtype).flatten(0, 1)
            page[place, :length] = rows[first : first + length]
    own = replace(
        meta,
        block_tables=tuple((place,) for place in range(len(meta))),
        tensors={},
        plans={},
        checked=set(),
    )
    return KVLayer(*pages), own
