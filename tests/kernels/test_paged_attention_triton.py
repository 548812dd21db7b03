"""Paged attention on the Triton path against its float64 reference."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from kernel_oracles import attention_reference
from sweeps import quick
from triton_case import TOLERANCE, assert_near, kernels, on_cpu, randn, row_by_row
from triton_pools import FORMS, filled

from vlm_serve.kernels.metadata import DecodeMeta, KVLayer, PrefillMeta
from vlm_serve.kernels.paged_attention import attention_decode, attention_prefill
from vlm_serve.kernels.paged_attention import triton as paged_triton


def reference(
    q: torch.Tensor, kv: KVLayer, table: tuple[int, ...], start: int, scale: float
) -> torch.Tensor:
    return attention_reference(q.cpu(), on_cpu(kv), table, start, scale)


def prefill_meta(
    starts: list[int], lengths: list[int], tables: tuple[tuple[int, ...], ...]
) -> PrefillMeta:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    empty = (-1,) * len(starts)
    return PrefillMeta(tuple(offsets), tuple(starts), tables, empty, empty, ((),) * len(starts))


def check_prefill(
    dtype: torch.dtype, form: torch.dtype, heads: tuple[int, int], dim: int, seed: int, size: int
) -> None:
    rng = random.Random(seed)
    lengths = [0, 1, rng.randint(2, 20), rng.randint(20, 40)]
    starts = [rng.randint(0, 40), rng.randint(0, 70), 0, rng.randint(0, 40)]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    kv, tables = filled(ends, heads[1], dim, form, seed, size)
    meta = prefill_meta(starts, lengths, tables)
    q = randn(meta.num_tokens, heads[0], 2 * dim, dtype=dtype, seed=seed)[..., :dim]
    with kernels():
        out = attention_prefill(q, kv, meta, scale=dim**-0.5)
    assert out.dtype == dtype and out.is_contiguous()
    for i in range(len(meta)):
        begin, end = meta.cu_seqlens[i], meta.cu_seqlens[i + 1]
        expected = reference(q[begin:end], kv, tables[i], starts[i], dim**-0.5)
        assert_near(out[begin:end], expected, TOLERANCE[dtype])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 16), (torch.bfloat16, 64)])
def test_prefill_of_every_stored_form(dtype: torch.dtype, form: torch.dtype, size: int) -> None:
    check_prefill(dtype, form, (6, 2), 64, seed=FORMS.index(form), size=size)


@pytest.mark.parametrize(
    ("heads", "dim"), [((1, 1), 64), ((16, 1), 80), ((3, 1), 128), ((2, 1), 256), ((2, 2), 96)]
)
def test_prefill_of_every_head_layout(heads: tuple[int, int], dim: int) -> None:
    check_prefill(torch.float16, torch.float16, heads, dim, seed=dim, size=dim)


@pytest.mark.parametrize("seed", range(3))
def test_a_slice_resumed_anywhere_has_the_bits_of_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    cut = rng.randint(1, 69)
    kv, tables = filled([70, 33], 2, 64, torch.float32, seed)
    q, other = randn(70, 4, 64, seed=seed), randn(33, 4, 64, seed=seed + 1)
    with kernels(), row_by_row():
        whole = attention_prefill(q, kv, prefill_meta([0], [70], tables[:1]), scale=0.1)
        meta = prefill_meta([0, cut], [33, 70 - cut], (tables[1], tables[0]))
        out = attention_prefill(torch.cat([other, q[cut:]]), kv, meta, scale=0.1)
    assert torch.equal(out[33:], whole[cut:])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("splits", "size"), [(1, 16), (4, 16), (2, 32)])
def test_decode_of_every_stored_form(
    form: torch.dtype, splits: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_decode(torch.float32, form, (6, 2), 64, splits, size, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "dim"), [((1, 1), 64), ((16, 1), 80), ((3, 1), 128), ((4, 1), 256)]
)
def test_decode_of_every_head_layout(
    dtype: torch.dtype, heads: tuple[int, int], dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_decode(dtype, dtype, heads, dim, 2, dim, monkeypatch)


def check_decode(
    dtype: torch.dtype,
    form: torch.dtype,
    heads: tuple[int, int],
    dim: int,
    splits: int,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_triton, "split_count", lambda programs, longest: splits)
    lengths = [1, 16, 100, 67]
    kv, tables = filled(lengths, heads[1], dim, form, dim, size)
    rows = (0,) * len(lengths)
    meta = DecodeMeta(tables, tuple(lengths), rows, rows, rows)
    q = randn(len(lengths), heads[0], dim, dtype=dtype)
    with kernels():
        out = attention_decode(q, kv, meta, scale=dim**-0.5)
    for i, length in enumerate(lengths):
        expected = reference(q[i : i + 1], kv, tables[i], length - 1, dim**-0.5)
        assert_near(out[i : i + 1], expected, TOLERANCE[dtype])


@pytest.mark.parametrize(
    "form", quick(FORMS, [torch.float32, torch.uint8], pytest.mark.interpreter)
)
def test_fixed_parts_give_a_token_its_bits_in_any_company(
    form: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside longer sequences there is room for more parts, and a part alone is merged too."""
    monkeypatch.setattr(paged_triton, "FIXED_PART", 32)
    lengths = [1, 32, 33, 100, 67]
    kv, tables = filled(lengths, 2, 64, form, seed=4)
    q = randn(len(lengths), 6, 64)

    def attend(chosen: list[int]) -> torch.Tensor:
        rows = (0,) * len(chosen)
        own = tuple(tables[i] for i in chosen), tuple(lengths[i] for i in chosen)
        meta = DecodeMeta(*own, rows, rows, rows)
        return attention_decode(q[chosen], kv, meta, scale=0.125, deterministic=True)

    with kernels(), row_by_row():
        together = attend(list(range(len(lengths))))
        for i, length in enumerate(lengths):
            assert torch.equal(attend([i])[0], together[i])
            expected = reference(q[i : i + 1], kv, tables[i], length - 1, 0.125)
            assert_near(together[i : i + 1], expected, TOLERANCE[torch.float32])
        assert torch.equal(attend([4, 0, 2])[1:], together[[0, 2]])


def test_parts_fill_the_device_and_are_never_many_for_few_keys() -> None:
    split_count = paged_triton.split_count
    assert split_count(1, 255) == 1
    assert split_count(4, 100_000) == 64
    assert split_count(64, 100_000) == 4
    assert split_count(4096, 100_000) == 1


@pytest.mark.parametrize("on_triton", [False, True])
@pytest.mark.parametrize("lengths", [(2, 17), (40, 600)])
def test_keys_begin_behind_the_first_slot(on_triton: bool, lengths: tuple[int, ...]) -> None:
    """As in the layer for drafts, whose first slot holds anything."""
    kv, tables = filled(list(lengths), 2, 64, torch.float32, 0, 16)
    moved = KVLayer(kv.k.clone(), kv.v.clone())
    for table, length in zip(tables, lengths, strict=True):
        for place in range(1, length):
            to, at = divmod(place - 1, 16), divmod(place, 16)
            for own, other in ((moved.k, kv.k), (moved.v, kv.v)):
                own[table[to[0]], to[1]] = other[table[at[0]], at[1]]
        kv.k[table[0], 0] = kv.v[table[0], 0] = float("nan")
    none = (-1,) * len(lengths)
    meta = DecodeMeta(tables, lengths, none, none, none)
    shorter = replace(meta, kv_lens=tuple(each - 1 for each in lengths), tensors={}, plans={})
    q = randn(len(lengths), 4, 64)
    with kernels() if on_triton else nullcontext():
        out = attention_decode(q, kv, meta, scale=0.125, first_key=1)
        expected = attention_decode(q, moved, shorter, scale=0.125)
    assert_near(out, expected, TOLERANCE[torch.float32])


def test_tokens_of_a_slice_share_a_table() -> None:
    kv, tables = filled([40, 33], 2, 64, torch.float32, 0, 16)
    lengths, none = (38, 39, 40, 31, 32, 33), (-1,) * 6
    meta = DecodeMeta(tuple(tables[i // 3] for i in range(6)), lengths, none, none, none)
    q = randn(6, 4, 64)
    with kernels():
        expected = attention_decode(q, kv, meta, scale=0.125)
        shared = replace(meta, checked=set(), plans={}, tensors=dict(meta.tensors))
        shared.tensors["block_tables"] = meta.tensors["block_tables"][::3].contiguous()
        assert torch.equal(attention_decode(q, kv, shared, scale=0.125), expected)
