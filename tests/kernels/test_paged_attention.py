"""Paged attention on the CPU: against the float64 reference, torch's SDPA, and bit by bit."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from kernel_case import randn
from kernel_oracles import attention_reference
from triton_case import assert_near

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.kv_write import write_kv
from vlm_serve.kernels.metadata import DecodeMeta, KVLayer, PrefillMeta
from vlm_serve.kernels.paged_attention import attention_decode, attention_prefill

pytestmark = pytest.mark.usefixtures("cpu_path")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
STORED = (*FLOATS, torch.float8_e4m3fn, torch.uint8)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def poisoned_pages(blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> KVLayer:
    """One layer of a pool of two, full of NaN (of 255 and NaN scales for int8)."""
    if dtype == torch.uint8:
        pool = torch.full((blocks, 2, 2, size, heads, dim), 255, dtype=dtype)
        scales = torch.full((blocks, 2, 4, size, heads), float("nan"), dtype=torch.float16)
        return KVLayer(pool[:, 1, 0], pool[:, 1, 1], *(scales[:, 1, i] for i in range(4)))
    pool = torch.full((blocks, 2, 2, size, heads, dim), float("nan")).to(dtype)
    return KVLayer(pool[:, 1, 0], pool[:, 1, 1])


def store(kv: KVLayer, table: tuple[int, ...], k: torch.Tensor, v: torch.Tensor) -> None:
    size = kv.k.shape[1]
    slots = torch.tensor([table[p // size] * size + p % size for p in range(len(k))])
    write_kv(k, v, kv, slots)


def tables_for(
    rng: random.Random, lengths: list[int], size: int
) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Random disjoint block tables and the number of blocks."""
    needed = [-(-length // size) for length in lengths]
    free = rng.sample(range(sum(needed) + 5), sum(needed))
    return sum(needed) + 5, tuple(tuple(free.pop() for _ in range(count)) for count in needed)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("seed", range(5))
def test_random_batches_equal_the_reference(seed: int, stored: torch.dtype) -> None:
    """Cached prefixes, empty slices, single queries; prefill in both modes, then decode."""
    rng = random.Random(seed)
    dtype = rng.choice(FLOATS)
    heads, shared, dim = rng.choice([1, 2, 4]), rng.choice([1, 3, 8]), rng.choice([32, 64, 128])
    size, scale = rng.choice([16, 64]), dim**-0.5
    slices = [(0, rng.randint(1, 150)), (rng.randint(1, 100), 1), (7, 0), (90, rng.randint(2, 80))]
    rng.shuffle(slices)
    lengths = [start + count for start, count in slices]
    blocks, tables = tables_for(rng, lengths, size)
    kv = poisoned_pages(blocks, size, heads, dim, stored)
    for i, length in enumerate(lengths):
        k, v = randn(length, heads, dim, seed=2 * i), randn(length, heads, dim, seed=2 * i + 1)
        store(kv, tables[i], k.to(dtype), v.to(dtype))
    offsets = [0]
    for _, count in slices:
        offsets.append(offsets[-1] + count)
    q = randn(offsets[-1], heads * shared, dim, dtype=dtype)
    meta = PrefillMeta(
        tuple(offsets),
        tuple(start for start, _ in slices),
        tables,
        (-1,) * 4,
        (0, 1, 2, 3),
        ((),) * 4,
    )
    out = attention_prefill(q, kv, meta, scale=scale)
    assert out.dtype == dtype and out.is_contiguous()
    for i, (start, count) in enumerate(slices):
        own = slice(offsets[i], offsets[i + 1])
        if count:
            expected = attention_reference(q[own], kv, tables[i], start, scale)
            assert_near(out[own], expected, TOLERANCE[dtype])
    present = [i for i, length in enumerate(lengths) if length]
    decode = DecodeMeta(
        tuple(tables[i] for i in present), tuple(lengths[i] for i in present), (), (), ()
    )
    query = randn(len(present), heads * shared, dim, dtype=dtype, seed=9)
    out = attention_decode(query, kv, decode, scale=scale)
    for place, i in enumerate(present):
        expected = attention_reference(
            query[place : place + 1], kv, tables[i], lengths[i] - 1, scale
        )
        assert_near(out[place], expected[0], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", FLOATS)
def test_prefill_equals_sdpa(dtype: torch.dtype) -> None:
    length, heads, shared, dim, size = 333, 2, 4, 64, 32
    _, tables = tables_for(random.Random(0), [length], size)
    kv = poisoned_pages(30, size, heads, dim, dtype)
    k, v = randn(length, heads, dim, dtype=dtype), randn(length, heads, dim, dtype=dtype, seed=1)
    store(kv, tables[0], k, v)
    q = randn(length, heads * shared, dim, dtype=dtype, seed=2)
    meta = PrefillMeta((0, length), (0,), tables, (-1,), (0,), ((),))
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True, scale=0.1
    )
    out = attention_prefill(q, kv, meta, scale=0.1)
    assert_near(out, expected[0].transpose(0, 1), TOLERANCE[dtype])


@pytest.mark.parametrize(("threads", "cases"), [(1, 180), (2, 60)])
def test_queries_have_the_bits_of_the_whole(threads: int, cases: int) -> None:
    """240 times: a slice of a sequence, on other pages and beside other sequences, against the
    whole sequence in one slice."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed in range(cases):
            check_slice(random.Random(seed))
    finally:
        torch.set_num_threads(before)


def check_slice(rng: random.Random) -> None:
    dtype, heads, shared = rng.choice(FLOATS), rng.choice([1, 2, 4]), rng.choice([1, 2, 3, 8])
    dim, size, length = rng.choice([32, 64]), rng.choice([16, 32, 128]), rng.randint(1, 300)
    k, v, q = (randn(length, n, dim, dtype=dtype, seed=n) for n in (heads, heads, heads * shared))
    start = rng.randint(0, length - 1)
    stop = rng.randint(start + 1, length)
    other = rng.randint(1, 100)
    blocks, tables = tables_for(rng, [length, stop, other], size)
    kv = poisoned_pages(blocks, size, heads, dim, dtype)
    store(kv, tables[0], k, v)
    store(kv, tables[1], k[:stop], v[:stop])
    store(kv, tables[2], k[:1].expand(other, -1, -1), v[:1].expand(other, -1, -1))
    alone = PrefillMeta((0, length), (0,), tables[:1], (-1,), (0,), ((),))
    whole = attention_prefill(q, kv, alone, scale=0.2)
    end = other + stop - start
    mixed = PrefillMeta(
        (0, other, end), (0, start), (tables[2], tables[1]), (-1, -1), (0, 1), ((), ())
    )
    noise = randn(other, heads * shared, dim, dtype=dtype)
    out = attention_prefill(torch.cat([noise, q[start:stop]]), kv, mixed, scale=0.2)
    assert torch.equal(out[other:], whole[start:stop])


@pytest.mark.parametrize("stored", STORED)
def test_decode_batches_of_many_lengths(stored: torch.dtype) -> None:
    lengths = [1, 16, 33, 47, 2, 64]
    blocks, tables = tables_for(random.Random(1), lengths, 16)
    kv = poisoned_pages(blocks, 16, 2, 32, stored)
    for i, length in enumerate(lengths):
        store(kv, tables[i], randn(length, 2, 32, seed=i), randn(length, 2, 32, seed=i + 9))
    q = randn(6, 6, 32)
    meta = DecodeMeta(tables, tuple(lengths), (), (), ())
    for _ in range(2):  # The second layer of a step finds what the first has made.
        out = attention_decode(q, kv, meta, scale=0.2)
        for i, length in enumerate(lengths):
            expected = attention_reference(q[i : i + 1], kv, tables[i], length - 1, 0.2)
            assert_near(out[i], expected[0], 2e-6)


def test_decode_tokens_have_the_same_bits_in_any_batch() -> None:
    lengths = [1, 16, 33, 47, 2, 64]
    blocks, tables = tables_for(random.Random(1), lengths, 16)
    kv = poisoned_pages(blocks, 16, 2, 32, torch.float32)
    for i, length in enumerate(lengths):
        store(kv, tables[i], randn(length, 2, 32, seed=i), randn(length, 2, 32, seed=i + 9))
    q = randn(6, 6, 32)

    def attend(chosen: list[int]) -> torch.Tensor:
        own = tuple(tables[i] for i in chosen), tuple(lengths[i] for i in chosen)
        meta = DecodeMeta(*own, (), (), ())
        return attention_decode(q[chosen], kv, meta, scale=0.2)

    together = attend(list(range(6)))
    for i, length in enumerate(lengths):
        assert torch.equal(attend([i])[0], together[i])
        expected = attention_reference(q[i : i + 1], kv, tables[i], length - 1, 0.2)
        assert_near(together[i], expected[0], 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_float8_number_is_read_as_it_is(dtype: torch.dtype) -> None:
    """Over a single key attention gives its value."""
    dim = 256
    codes = torch.arange(dim, dtype=torch.uint8).view(torch.float8_e4m3fn)
    kv = KVLayer(*(torch.zeros(1, 16, 1, dim).to(torch.float8_e4m3fn) for _ in range(2)))
    kv.v[0, 0, 0] = codes
    query = randn(1, 1, dim, dtype=dtype)
    out = attention_decode(query, kv, DecodeMeta(((0,),), (1,), (), (), ()), scale=1.0)
    torch.testing.assert_close(out[0, 0].float(), codes.float(), rtol=0, atol=0, equal_nan=True)


def test_an_empty_decode_batch() -> None:
    kv = poisoned_pages(2, 16, 2, 32, torch.float32)
    out = attention_decode(randn(0, 4, 32), kv, DecodeMeta((), (), (), (), ()), scale=1.0)
    assert out.shape == (0, 4, 32)


def test_bad_arguments_are_named() -> None:
    kv = poisoned_pages(4, 16, 2, 32, torch.float32)
    q = randn(5, 4, 32)
    meta = PrefillMeta((0, 5), (14,), ((0, 1),), (-1,), (0,), ((5,),))
    short = PrefillMeta((0, 5), (14,), ((0,),), (-1,), (0,), ((5,),))
    outside = PrefillMeta((0, 5), (14,), ((0, 4),), (-1,), (0,), ((5,),))
    half = KVLayer(kv.k, kv.v, k_scale=torch.zeros(4, 16, 2, dtype=torch.float16))
    for name, arguments in {
        "q": (q[:, :3], kv, meta),
        "kv.v": (q, KVLayer(kv.k, kv.v[:3]), meta),
        "kv.k_scale": (q, half, meta),
        "meta.cu_seqlens": (q[:4], kv, meta),
        "meta.block_tables": (q, kv, short),
    }.items():
        with pytest.raises(KernelArgumentError, match=name) as error:
            attention_prefill(*arguments, scale=1.0)
        assert error.value.argument == name
    with pytest.raises(KernelArgumentError, match="meta.block_tables"):
        attention_prefill(q, kv, outside, scale=1.0)
    with pytest.raises(KernelArgumentError, match="meta.kv_lens"):
        attention_decode(q[:1], kv, DecodeMeta(((0,),), (0,), (), (), ()), scale=1.0)
