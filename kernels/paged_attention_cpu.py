"""Attention over paged keys and values, torch CPU path.

Prefill runs over tiles of 64 queries: scores of all query heads that share a key head in one
product, softmax in place, one product with the values. At 64 rows this is as fast as torch's fused
kernel, and its bits depend on a tile's shape only. `deterministic` fixes that shape: tiles start at
absolute multiples of 64, queries and keys are padded with zeros to the tile's end.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from vlm_serve.kernels.kv_quant import dequantise
from vlm_serve.kernels.metadata import DecodeMeta, KVLayer, PrefillMeta

TILE = 64
# Scores of one product, in elements: beyond this, key heads take turns.
MAX_SCORES = 1 << 23


def attention_prefill(
    q: torch.Tensor, kv: KVLayer, meta: PrefillMeta, *, scale: float, deterministic: bool
) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=q.dtype)
    tables = _tables(meta)
    # Values meet probabilities in bfloat16 where the CPU multiplies that fast; scores never.
    value_dtype = q.dtype if q.dtype == torch.bfloat16 else torch.float32
    for i in range(len(meta)):
        begin, end = meta.cu_seqlens[i], meta.cu_seqlens[i + 1]
        if begin == end:
            continue
        start = meta.starts[i]
        length = start + end - begin
        padded = -(-length // TILE) * TILE if deterministic else length
        keys = _gather(kv.k, kv.k_scale, kv.k_zero, tables[i], length, padded, torch.float32)
        values = _gather(kv.v, kv.v_scale, kv.v_zero, tables[i], length, padded, value_dtype)
        attend = _Tiles(keys, values, q.shape[1], scale)
        first = start - start % TILE if deterministic else start
        for at in range(first, length, TILE):
            stop = at + TILE if deterministic else min(at + TILE, length)
            low, high = max(at, start), min(stop, length)
            rows = slice(begin + low - start, begin + high - start)
            attend(q[rows], low - at, stop - at, stop, out[rows])
    return out


class _Tiles:
    """Attention of query tiles over one sequence's keys and values, `[length, Hkv, D]` each."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, heads: int, scale: float) -> None:
        self._keys = keys.permute(1, 2, 0)
        self._values = values.transpose(0, 1)
        self._scale = scale
        self._key_heads, dim = keys.shape[1:]
        self._shared = heads // self._key_heads
        self._queries = torch.zeros(self._key_heads, self._shared, TILE, dim)
        most = heads * TILE * keys.shape[0]
        self._turns = self._key_heads if most > MAX_SCORES else 1
        self._scores = torch.empty(most // self._turns)

    def __call__(
        self, q: torch.Tensor, offset: int, rows: int, visible: int, out: torch.Tensor
    ) -> None:
        """Queries q are rows offset, offset + 1, ... of a tile of `rows` rows whose last one sees
        `visible` keys."""
        own = slice(offset, offset + q.shape[0])
        queries = self._queries[:, :, :rows]
        if q.shape[0] < rows:
            queries.zero_()
        grouped = (q.shape[0], self._key_heads, self._shared, q.shape[2])
        torch.mul(q.view(grouped).permute(1, 2, 0, 3), self._scale, out=queries[:, :, own])
        queries = queries.flatten(1, 2)
        target = out.view(grouped).permute(1, 2, 0, 3)
        step = self._key_heads // self._turns
        for first in range(0, self._key_heads, step):
            heads = slice(first, first + step)
            mixed = self._mix(queries[heads], heads, rows, visible)
            target[heads] = mixed.view(step, self._shared, rows, -1)[:, :, own]

    def _mix(self, queries: torch.Tensor, heads: slice, rows: int, visible: int) -> torch.Tensor:
        count, packed = queries.shape[:2]
        scores = self._scores[: count * packed * visible].view(count, packed, visible)
        torch.bmm(queries, self._keys[heads, :, :visible], out=scores)
        diagonal = scores.view(count, self._shared, rows, visible)[..., visible - rows :]
        diagonal.masked_fill_(_future(rows), float("-inf"))
        torch.softmax(scores, dim=-1, out=scores)
        values = self._values[heads, :visible]
        return torch.bmm(scores.to(values.dtype), values)


@cache
def _future(rows: int) -> torch.Tensor:
    """True where a key of the tile comes after the query."""
    return torch.ones(rows, rows, dtype=torch.bool).triu(1)


def attention_decode(
    q: torch.Tensor, kv: KVLayer, meta: DecodeMeta, *, scale: float
) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=q.dtype)
    tables = _tables(meta)
    key_heads, dim = kv.k.shape[2:]
    fused = q.dtype != torch.float32
    dtype = q.dtype if fused else torch.float32
    for i, length in enumerate(meta.kv_lens):
        keys = _gather(kv.k, kv.k_scale, kv.k_zero, tables[i], length, length, dtype)
        values = _gather(kv.v, kv.v_scale, kv.v_zero, tables[i], length, length, dtype)
        # Query heads that share keys are the rows of one product, so keys are read once.
        query = q[i].reshape(key_heads, -1, dim)
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        if fused:
            mixed = F.scaled_dot_product_attention(
                query.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), scale=scale
            )
        else:
            scores = torch.bmm(query * scale, keys.mT)
            mixed = torch.bmm(torch.softmax(scores, dim=-1, out=scores), values)
        out[i] = mixed.reshape(q.shape[1:])
    return out


def _tables(meta: PrefillMeta | DecodeMeta) -> list[torch.Tensor]:
    """Block tables as index tensors, made once per step."""
    if "cpu_block_tables" not in meta.tensors:
        flat = [block for table in meta.block_tables for block in table]
        meta.tensors["cpu_block_tables"] = torch.tensor(flat, dtype=torch.int64)
    sizes = [len(table) for table in meta.block_tables]
    return list(torch.split(meta.tensors["cpu_block_tables"], sizes))


def _gather(
    pages: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    table: torch.Tensor,
    length: int,
    padded: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """One sequence's keys or values, `[padded, Hkv, D]` in `dtype`, zero from `length` on."""
    size = pages.shape[1]
    table = table[: -(-length // size)]
    missing = -(-padded // size) - len(table)
    if missing > 0:  # Any block will do, it is overwritten with zeros.
        table = torch.cat([table, table[:1].expand(missing)])
    if scale is not None and zero is not None:
        picked = dequantise(
            pages.index_select(0, table),
            scale.index_select(0, table),
            zero.index_select(0, table),
            dtype,
        )
    elif pages.dtype == torch.float8_e4m3fn:
        codes = pages.view(torch.uint8).index_select(0, table)
        picked = codes.view(pages.dtype).to(dtype)
    else:
        picked = pages.index_select(0, table).to(dtype)
    rows = picked.flatten(0, 1)[:padded]
    rows[length:].zero_()
    return rows
