"""The causal convolution on the Triton path against its float64 reference."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from kernel_oracles import causal_conv_reference
from sweeps import quick
from triton_case import TOLERANCE, assert_near, kernels, poison, prefill_case, randn

from vlm_serve.kernels.causal_conv import (
    causal_conv_decode,
    causal_conv_prefill,
    causal_conv_verify,
)
from vlm_serve.kernels.causal_conv.reference import SILU, Behind
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta, VerifyMeta

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def tail_pool(
    rows: int, written: set[int], channels: int, kept: int, dtype: torch.dtype
) -> torch.Tensor:
    """A layer's view of a pool of two layers; rows that nobody wrote hold NaN."""
    pool = poison(rows, 2, channels, kept, dtype=dtype)
    for row in written:
        pool[row, 1] = randn(channels, kept, dtype=dtype, seed=row)
    return pool[:, 1]


def check_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    tails: torch.Tensor,
    meta: PrefillMeta,
    behind: Behind = SILU,
) -> None:
    before = tails.clone()
    with kernels():
        out = causal_conv_prefill(x, weight, tails, meta, behind)
    changed = set(meta.dst_rows)
    for i in range(len(meta)):
        begin, end = meta.cu_seqlens[i], meta.cu_seqlens[i + 1]
        src = meta.src_rows[i]
        expected, after = causal_conv_reference(
            x[begin:end], weight, None if src < 0 else before[src], behind
        )
        assert_near(out[begin:end], expected, TOLERANCE[x.dtype])
        assert torch.equal(tails[meta.dst_rows[i]], after[-1])
        for sequence, chunk, row in meta.snapshots:
            if sequence == i:
                assert torch.equal(tails[row], after[meta.chunk_ends[i][chunk] - begin])
                changed.add(row)
    for row in set(range(tails.shape[0])) - changed:
        assert torch.equal(tails[row].nan_to_num(9), before[row].nan_to_num(9))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("seed", quick(range(3), [1], pytest.mark.interpreter))
def test_random_slices(dtype: torch.dtype, taps: int, seed: int) -> None:
    meta, rows = prefill_case(random.Random(seed), sequences=4, longest=40, chunk=16)
    channels = 5 + 300 * (seed == 0)
    x = randn(meta.num_tokens, channels + 3, dtype=dtype, seed=seed)[:, :channels]
    written = {row for row in meta.src_rows if row >= 0}
    tails = tail_pool(rows, written, channels, taps - 1, dtype)
    check_prefill(x, randn(channels, taps, dtype=dtype, seed=9), tails, meta)


def test_slices_shorter_than_the_tail_shift_it_in_place() -> None:
    meta = PrefillMeta(
        cu_seqlens=(0, 1, 1, 3, 4),
        starts=(7, 9, 0, 5),
        block_tables=((), (), (), ()),
        src_rows=(2, 4, -1, 0),
        dst_rows=(2, 3, 5, 6),
        chunk_ends=((1,), (), (2, 3), (4,)),
        snapshots=((2, 0, 1), (0, 0, 7)),
    )
    tails = tail_pool(8, {0, 2, 4}, 6, 3, torch.float32)
    check_prefill(randn(4, 6), randn(6, 4), tails, meta)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [2, 4])
def test_decode(dtype: torch.dtype, taps: int) -> None:
    channels = 300
    meta = DecodeMeta(
        block_tables=((),) * 4,
        kv_lens=(1,) * 4,
        src_rows=(3, -1, 0, 0),
        dst_rows=(3, 1, 5, 6),
        snapshot_rows=(-1, 2, -1, 7),
    )
    tails = tail_pool(9, {0, 3}, channels, taps - 1, dtype)
    before = tails.clone()
    x = randn(4, channels + 1, dtype=dtype)[:, :channels]
    weight = randn(channels, taps, dtype=dtype)
    with kernels():
        out = causal_conv_decode(x, weight, tails, meta)
    for i, src in enumerate(meta.src_rows):
        expected, after = causal_conv_reference(
            x[i : i + 1], weight, None if src < 0 else before[src]
        )
        assert_near(out[i : i + 1], expected, TOLERANCE[dtype])
        assert torch.equal(tails[meta.dst_rows[i]], after[1])
        if meta.snapshot_rows[i] >= 0:
            assert torch.equal(tails[meta.snapshot_rows[i]], after[1])
    for row in (0, 4, 8):
        assert torch.equal(tails[row].nan_to_num(9), before[row].nan_to_num(9))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_drafted_tokens(dtype: torch.dtype, taps: int) -> None:
    """Slices of 1, 5 and 3 tokens, with 0, 1 and 4 earlier inputs to fold: the kernel writes the
    tails and inputs that torch does."""
    channels, rows, first, folded = 300, (2, 0, 3), (5, 0, 10), (0, 1, 4)
    meta = VerifyMeta((0, 1, 6, 9), (0,) * 3, ((),) * 3, rows, first, folded)
    x = randn(9, channels + 3, dtype=dtype)[:, :channels]
    weight = randn(channels, taps, dtype=dtype)
    found = []
    for on_triton in (False, True):
        tails = tail_pool(5, set(rows), channels, taps - 1, dtype)
        inputs = poison(15, 2, channels, dtype=dtype)[:, 1]
        inputs[:1], inputs[10:14] = randn(1, channels, dtype=dtype), randn(4, channels, dtype=dtype)
        own = replace(meta, checked=set(), plans={}, tensors={})
        with kernels() if on_triton else nullcontext():
            out = causal_conv_verify(x, weight, tails, inputs, own)
        found.append((out, tails.nan_to_num(9), inputs.nan_to_num(9)))
    (expected, *pools), (out, *others) = found
    assert_near(out, expected, TOLERANCE[dtype])
    assert all(map(torch.equal, pools, others))


@pytest.mark.parametrize("dtype", quick(DTYPES, [torch.bfloat16], pytest.mark.interpreter))
def test_a_bias_and_nothing_behind_it(dtype: torch.dtype) -> None:
    """Compare all three kernels: a prefill, a token behind it, and the same token as a draft."""
    channels, taps, length = 40, 3, 21
    x, weight = randn(length + 1, channels, dtype=dtype), randn(channels, taps, dtype=dtype)
    behind = Behind(randn(channels, dtype=dtype, seed=5), silu=False)
    tails = tail_pool(3, set(), channels, taps - 1, dtype)
    meta = PrefillMeta((0, length), (0,), ((),), (-1,), (0,), ((16, length),))
    check_prefill(x[:length], weight, tails, meta, behind)
    tail, inputs = tails[0].clone(), poison(1, channels, dtype=dtype)
    drafts = VerifyMeta((0, 1), (length,), ((),), (0,), (0,), (0,))
    step = DecodeMeta(((),), (length + 1,), (0,), (1,), (-1,))
    expected, after = causal_conv_reference(x[length:], weight, tail, behind)
    with kernels():
        verified = causal_conv_verify(x[length:], weight, tails, inputs, drafts, behind)
        decoded = causal_conv_decode(x[length:], weight, tails, step, behind)
    for out in (verified, decoded):
        assert_near(out, expected, TOLERANCE[dtype])
    assert torch.equal(tails[0], tail) and torch.equal(inputs, x[length:])
    assert torch.equal(tails[1], after[-1])
