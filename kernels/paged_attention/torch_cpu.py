"""Attention over paged keys and values, torch CPU path.

Prefill runs over tiles of 64 queries: scores of all query heads that share a key head in one
product, softmax in place, one product with the values. At 64 rows this is as fast as torch's fused
kernel, and its bits depend on a tile's shape only. `deterministic` fixes that shape: tiles start at
absolute multiples of 64, and queries and keys are padded with zeros to the tile's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F

from vlm_serve.kernels.kv_quant import dequantise
from vlm_serve.kernels.metadata import DecodeMeta, KVLayer, PrefillMeta

TILE = 64
# Most scores of one product, in elements: beyond this, each key head has a pass of its own.
MAX_SCORES = 1 << 23
# Most keys of one decode call, in elements; more sequences are split into several calls.
MAX_KEYS = 1 << 20


def attention_prefill(
    q: torch.Tensor, kv: KVLayer, meta: PrefillMeta, *, scale: float, deterministic: bool
) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=q.dtype)
    tables = _tables(meta)
    # In bfloat16 models, probabilities multiply values in bfloat16; scores stay in float32.
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
        self._passes = self._key_heads if most > MAX_SCORES else 1
        self._scores = torch.empty(most // self._passes)

    def __call__(
        self, q: torch.Tensor, offset: int, rows: int, visible: int, out: torch.Tensor
    ) -> None:
        """Attend from rows offset, offset + 1, ... of a tile of `rows` queries.

        The tile's last row sees `visible` keys.
        """
        own = slice(offset, offset + q.shape[0])
        queries = self._queries[:, :, :rows]
        if q.shape[0] < rows:
            queries.zero_()
        grouped = (q.shape[0], self._key_heads, self._shared, q.shape[2])
        torch.mul(q.view(grouped).permute(1, 2, 0, 3), self._scale, out=queries[:, :, own])
        queries = queries.flatten(1, 2)
        target = out.view(grouped).permute(1, 2, 0, 3)
        step = self._key_heads // self._passes
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
    """Return a mask that is True where a key of the tile comes after the query."""
    return torch.ones(rows, rows, dtype=torch.bool).triu(1)


def attention_decode(
    q: torch.Tensor,
    kv: KVLayer,
    meta: DecodeMeta,
    *,
    scale: float,
    deterministic: bool,
    first_key: int = 0,
) -> torch.Tensor:
    size, key_heads, dim = kv.k.shape[1:]
    if first_key:
        return _decode_later(q, kv, meta, scale, first_key)
    groups = _decode_groups(meta, size, key_heads * dim, apart=deterministic)
    results = [_decode_group(q, kv, group, scale) for group in groups]
    if len(groups) == 1 and groups[0].members is None:
        return results[0]
    out = torch.empty(q.shape, dtype=q.dtype)
    for group, result in zip(groups, results, strict=True):
        out[group.members] = result
    return out


def _decode_later(
    q: torch.Tensor, kv: KVLayer, meta: DecodeMeta, scale: float, first_key: int
) -> torch.Tensor:
    """Attend from each token alone to its keys from `first_key` on."""
    results, heads = [], kv.k.shape[2:]
    for place, (table, length) in enumerate(zip(meta.block_tables, meta.kv_lens, strict=True)):
        blocks = torch.tensor(list(table[: -(-length // kv.k.shape[1])]))
        keys, values = (
            pick(*stored, blocks, q.dtype).view(1, -1, *heads)[:, first_key:length].transpose(1, 2)
            for stored in ((kv.k, kv.k_scale, kv.k_zero), (kv.v, kv.v_scale, kv.v_zero))
        )
        query = q[place].reshape(1, heads[0], -1, heads[1])
        mixed = F.scaled_dot_product_attention(query, keys, values, scale=scale)
        results.append(mixed.reshape(q.shape[1:]))
    return torch.stack(results)


@dataclass(frozen=True)
class _Group:
    """Sequences that attend in one call, padded to the longest.

    Attributes:
        members: indices in the batch; None for all of them in order.
        table: int64 `[n * W]` blocks; a sequence's missing ones repeat its first.
        lengths: keys of each sequence.
        mask: float32 `[n, 1, 1, W * block_size]`, -inf where a sequence has no key; None if no
            sequence needs one.
    """

    members: torch.Tensor | None
    table: torch.Tensor
    lengths: tuple[int, ...]
    mask: torch.Tensor | None


def _decode_groups(meta: DecodeMeta, size: int, width: int, *, apart: bool) -> list[_Group]:
    """Group all sequences together if that stays small, else neighbours in order of length; each
    `apart` if its call may have no padding."""
    if "attention_decode" not in meta.plans:
        groups: list[_Group] = []
        longest = -(-max(meta.kv_lens, default=0) // size) * size
        if apart:
            groups = [_group(meta, size, [i]) for i in range(len(meta))]
        elif len(meta) and len(meta) * longest * width <= MAX_KEYS:
            groups.append(_group(meta, size, None))
        else:
            order = sorted(range(len(meta)), key=lambda i: -meta.kv_lens[i])
            while order:
                count = max(1, MAX_KEYS // (meta.kv_lens[order[0]] * width))
                groups.append(_group(meta, size, order[:count]))
                order = order[count:]
        meta.plans["attention_decode"] = groups
    return cast(list[_Group], meta.plans["attention_decode"])


def _group(meta: DecodeMeta, size: int, members: list[int] | None) -> _Group:
    chosen = range(len(meta)) if members is None else members
    lengths = tuple(meta.kv_lens[i] for i in chosen)
    blocks = -(-max(lengths) // size)
    table: list[int] = []
    for i, length in zip(chosen, lengths, strict=True):
        own = list(meta.block_tables[i][: -(-length // size)])
        table.extend(own + own[:1] * (blocks - len(own)))
    mask = None
    if min(lengths) < blocks * size:
        mask = torch.zeros(len(lengths), 1, 1, blocks * size)
        for place, length in enumerate(lengths):
            mask[place, ..., length:] = float("-inf")
    return _Group(
        None if members is None else torch.tensor(members),
        torch.tensor(table),
        lengths,
        mask,
    )


def _decode_group(q: torch.Tensor, kv: KVLayer, group: _Group, scale: float) -> torch.Tensor:
    key_heads, dim = kv.k.shape[2:]
    count = len(group.lengths)
    query = q if group.members is None else q[group.members]
    keys = pick(kv.k, kv.k_scale, kv.k_zero, group.table, q.dtype).view(count, -1, key_heads, dim)
    values = pick(kv.v, kv.v_scale, kv.v_zero, group.table, q.dtype).view(keys.shape)
    mask = group.mask
    if count == 1:  # One sequence is cut to its length and needs no mask.
        keys, values = keys[:, : group.lengths[0]], values[:, : group.lengths[0]]
        mask = None
    elif mask is not None:
        # Slots past a sequence's end may hold NaN, which no mask removes.
        for i, length in enumerate(group.lengths):
            keys[i, length:].zero_()
            values[i, length:].zero_()
        mask = mask.to(q.dtype)
    # Query heads with shared keys are the rows of one product, so keys are read once.
    mixed = F.scaled_dot_product_attention(
        query.reshape(count, key_heads, -1, dim),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask,
        scale=scale,
    )
    return mixed.reshape(query.shape)


def _tables(meta: PrefillMeta) -> list[torch.Tensor]:
    """Return block tables as index tensors, made once per step."""
    if "attention_prefill" not in meta.plans:
        tables = [torch.tensor(table, dtype=torch.int64) for table in meta.block_tables]
        meta.plans["attention_prefill"] = tables
    return cast(list[torch.Tensor], meta.plans["attention_prefill"])


def _gather(
    pages: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    table: torch.Tensor,
    length: int,
    padded: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gather one sequence's keys or values, `[padded, Hkv, D]` in `dtype`, zero from `length`
    on."""
    size = pages.shape[1]
    table = table[: -(-length // size)]
    missing = -(-padded // size) - len(table)
    if missing > 0:  # Any block will do: zeros overwrite it.
        table = torch.cat([table, table[:1].expand(missing)])
    rows = pick(pages, scale, zero, table, dtype).flatten(0, 1)[:padded]
    rows[length:].zero_()
    return rows


def pick(
    pages: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    blocks: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Copy some blocks from their stored form to `[n, block_size, Hkv, D]` in `dtype`."""
    if scale is not None and zero is not None:
        return dequantise(
            pages.index_select(0, blocks),
            scale.index_select(0, blocks),
            zero.index_select(0, blocks),
            dtype,
        )
    if pages.dtype == torch.float8_e4m3fn:
        codes = pages.view(torch.uint8).index_select(0, blocks)
        return codes.view(pages.dtype).to(dtype)
    return pages.index_select(0, blocks).to(dtype)
