"""Causal attention over paged keys and values: packed prefill slices and single decode tokens.

Softmax attention with grouped query heads (query head h reads key head `h * Hkv / Hq`). Keys and
values are read from the pages in their stored form, this step's tokens included. So a cached token
and a fresh one look the same to a query. A query's bits depend on its sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, cast

import torch

from vlm_serve.kernels import elementwise
from vlm_serve.kernels.checks import (
    FLOAT_DTYPES,
    KernelArgumentError,
    check_block_tables,
    check_kv_layer,
    check_tensor,
)
from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.kv_quant import pick
from vlm_serve.kernels.metadata import DecodeMeta, KVLayer, PrefillMeta, VerifyMeta
from vlm_serve.kernels.paged_attention import compiled, reference

FIXED_PART = 2048
"""Keys of a part of attention on a GPU: its bounds follow from positions alone, so a query's bits
depend on its own sequence. A multiple of every tile."""
SUMS_BYTES = 256 << 20
"""Bytes of partial sums in one call, at most. If parts need more, a program walks several."""
MOST_TILE_ROWS = 128
"""Rows of a tile of prompts, at most: heads of its tokens that share a key head."""
_STEP = 64
_TABLES = ("kv_lens", "block_tables")
_TRITON = "vlm_serve.kernels.paged_attention.triton"
_prefill = Op(
    reference.attention, compiled=compiled.attention, triton=f"{_TRITON}:attention_prefill"
)
_decode = Op(reference.attention, compiled=compiled.attention, triton=f"{_TRITON}:attention_decode")


class SumsRoom(NamedTuple):
    """Room for the partial sums of a call, by tiles of queries that read the same keys.

    Attributes:
        tiles: tiles that are computed at a time.
        most: programs of a tile and key head: all but the first attend to one part.
        slots: sums of a tile: one for each program, and one more if the first walks several parts.
            With one, all keys are one part, and results are written at once.
    """

    tiles: int
    most: int
    slots: int


def sums_room(tiles: int, rows: int, dim: int, keys: int, part: int = FIXED_PART) -> SumsRoom:
    """Return the room for partial sums.

    Args:
        tiles: of queries: decode tokens, or tiles of prompts.
        rows: of a tile, those of all key heads.
        dim: of a head.
        keys: of the longest sequence.
        part: keys of a part.
    """
    parts = -(-keys // part)
    if parts <= 1:
        return SumsRoom(tiles, 1, 1)
    slots = max(8, SUMS_BYTES // (_sum_bytes(dim) * rows))
    # Multiples of four: the tables of each launch are as aligned as the first one's.
    limit = slots // 8 * 4
    calls = -(-tiles // limit)
    at_once = tiles if calls == 1 else -(-tiles // (4 * calls)) * 4
    most = min(parts, slots // at_once)
    return SumsRoom(at_once, most, most) if most == parts else SumsRoom(at_once, most - 1, most)


def sums_bytes(rows: int, dim: int, keys: int) -> int:
    """Return the bytes of all partial sums of a call, at most.

    Args:
        rows: heads of all tokens, and of padding.
        dim, keys: see `sums_room`.
    """
    parts = -(-keys // FIXED_PART)
    return min(SUMS_BYTES, rows * parts * _sum_bytes(dim)) if parts > 1 else 0


def _sum_bytes(dim: int) -> int:
    """Return the bytes of a row's sums of one part: a maximum, a norm and `dim` totals."""
    return 4 * (dim + 2)


def without_first(
    kv: KVLayer, meta: PrefillMeta, first: int, dtype: torch.dtype
) -> tuple[KVLayer, PrefillMeta]:
    """Copy keys and values without each sequence's first slots, into one page per sequence,
    for kernels that begin at slot 0.

    Args:
        kv: the layer's pages.
        meta: slices; `starts` count keys, and each table covers `first` slots more.
        first: slots of a table before its first key.
        dtype: of the copy.

    Returns:
        The copied pages, and the slices over them.
    """
    size = kv.k.shape[1]
    lengths = meta.kv_lens
    longest = -(-max(lengths) // _STEP) * _STEP
    shape = (len(meta), longest, *kv.k.shape[2:])
    pages = [torch.zeros(shape, dtype=dtype, device=kv.k.device) for _ in range(2)]
    for place, (length, table) in enumerate(zip(lengths, meta.block_tables, strict=True)):
        blocks = torch.tensor(
            list(table[: -(-(length + first) // size)]), dtype=torch.int64, device=kv.k.device
        )
        for page, (stored, scale, zero) in zip(pages, kv.halves, strict=True):
            rows = pick(stored, scale, zero, blocks, dtype).flatten(0, 1)
            page[place, :length] = rows[first : first + length]
    gathered = replace(
        meta,
        block_tables=tuple((place,) for place in range(len(meta))),
        tensors={},
        plans={},
        checked=set(),
    )
    return KVLayer(*pages), gathered


def _gated_by_ops(
    q: torch.Tensor,
    kv: KVLayer,
    meta: DecodeMeta,
    gate: torch.Tensor,
    *,
    scale: float,
    first_key: int = 0,
) -> torch.Tensor:
    """Run both ops, each by the kernels that it has."""
    out = attention_decode(q, kv, meta, scale=scale, first_key=first_key)
    return elementwise.times_sigmoid(out.flatten(1), gate).view(out.shape)


_gated = Op(_gated_by_ops, triton=f"{_TRITON}:attention_decode")


def attention_prefill(
    q: torch.Tensor,
    kv: KVLayer,
    meta: PrefillMeta,
    *,
    scale: float,
) -> torch.Tensor:
    """Attend from each slice's queries to its cached prefix and, causally, to the slice itself.

    Args:
        q: `[N, Hq, D]`, float32, bfloat16 or float16, dense last dimension; `Hq` a multiple of
            `Hkv`.
        kv: the layer's pages, already holding this step's keys and values.
        meta: slices, their absolute starts and block tables.
        scale: factor on the scores, usually `D ** -0.5`.

    Returns:
        `[N, Hq, D]` in the dtype of q, contiguous.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    _check(q, kv)
    if len(meta.cu_seqlens) != len(meta) + 1 or meta.num_tokens != q.shape[0]:
        raise KernelArgumentError("meta.cu_seqlens", f"must end at {q.shape[0]}")
    check_block_tables(meta, meta.kv_lens, kv.k.shape[0], kv.k.shape[1])
    return _prefill(q.device, q, kv, meta, scale=scale)


def attention_decode(
    q: torch.Tensor,
    kv: KVLayer,
    meta: DecodeMeta,
    gate: torch.Tensor | None = None,
    *,
    scale: float,
    first_key: int = 0,
) -> torch.Tensor:
    """Attend from one query per sequence to its `kv_lens` keys.

    Args:
        q: `[B, Hq, D]`, float32, bfloat16 or float16, dense last dimension.
        kv: the layer's pages, already holding this step's keys and values.
        meta: key counts (>= 1) and block tables.
        gate: `[B, Hq * D]` in the dtype of q, dense rows: its sigmoids multiply the rounded result;
            None: there is none.
        scale: factor on the scores.
        first_key: 0 or 1, the slot of a sequence's first key; counts include the slots before it.

    Returns:
        `[B, Hq, D]` in the dtype of q.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    _check(q, kv)
    if len(meta) != q.shape[0] or any(length < 1 for length in meta.kv_lens):
        raise KernelArgumentError("meta.kv_lens", f"expected {q.shape[0]} positive lengths")
    check_block_tables(meta, meta.kv_lens, kv.k.shape[0], kv.k.shape[1])
    if gate is None:
        return _decode(q.device, q, kv, meta, scale=scale, first_key=first_key)
    check_tensor("gate", gate, (q.shape[0], q.shape[1] * q.shape[2]), (q.dtype,), q.device)
    return _gated(q.device, q, kv, meta, gate, scale=scale, first_key=first_key)


def attention_verify(
    q: torch.Tensor,
    kv: KVLayer,
    meta: VerifyMeta,
    gate: torch.Tensor | None = None,
    *,
    scale: float,
) -> torch.Tensor:
    """Attend from drafted tokens as if each were the decode token after the previous ones.

    Args:
        q: `[N, Hq, D]`; q, kv, gate and scale as for `attention_decode`.
        meta: slices, their absolute starts and block tables.

    Returns:
        `[N, Hq, D]` in the dtype of q.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    if "as decode tokens" not in meta.plans:
        meta.plans["as decode tokens"] = _as_decode_tokens(meta)
    tokens = cast(DecodeMeta, meta.plans["as decode tokens"])
    return attention_decode(q, kv, tokens, gate, scale=scale)


def _as_decode_tokens(meta: VerifyMeta) -> DecodeMeta:
    tables: list[Sequence[int]] = []
    lengths: list[int] = []
    slices = zip(meta.starts, pairwise(meta.cu_seqlens), meta.block_tables, strict=True)
    for start, (begin, end), table in slices:
        tables += [table] * (end - begin)
        lengths += range(start + 1, start + 1 + end - begin)
    none = (-1,) * len(lengths)
    # Of a captured step: the caller's own.
    given = {name: meta.tensors[name] for name in _TABLES if name in meta.tensors}
    return DecodeMeta(tuple(tables), tuple(lengths), none, none, none, tensors=given)


def _check(q: torch.Tensor, kv: KVLayer) -> None:
    check_kv_layer(kv, q.device)
    heads, dim = kv.k.shape[2:]
    check_tensor("q", q, (None, None, dim), FLOAT_DTYPES, q.device)
    if q.shape[1] % heads:
        raise KernelArgumentError("q", f"{q.shape[1]} query heads for {heads} key heads")
