"""The gated delta rule and the recurrence of Mamba2 on the Triton path, against their float64
reference."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_oracles import gated_delta_reference
from sweeps import quick
from triton_case import assert_near, heads_of, kernels, prefill_case, randn
from triton_pools import state_pool

from vlm_serve.kernels.gated_delta import (
    chunk_gated_delta,
    recurrent_gated_delta,
    step_lengths,
)
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(
    tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Inputs:
    """q, k, v as views of one fused projection; keys that resemble each other, so that the
    triangular systems are far from the identity."""
    key_heads, value_heads = heads
    key_dim, value_dim = dims
    sizes = (key_heads * key_dim, key_heads * key_dim, value_heads * value_dim)
    fused = randn(tokens, sum(sizes) + 4, seed=seed)
    fused[:, sizes[0] : 2 * sizes[0]] += 2
    fused = fused.to(dtype)
    first, second = sizes[0], 2 * sizes[0]
    g = -randn(tokens, value_heads, seed=seed + 1).abs() * 0.2
    beta = torch.sigmoid(3 * randn(tokens, value_heads, seed=seed + 2)).to(dtype)
    return (
        heads_of(fused[:, :first], key_heads),
        heads_of(fused[:, first:second], key_heads),
        heads_of(fused[:, second : second + sizes[2]], value_heads),
        g,
        beta,
    )


def skips(heads: int, wanted: bool) -> torch.Tensor | None:
    return randn(heads, seed=9) if wanted else None


def check_prefill(
    arguments: Inputs,
    state: torch.Tensor,
    meta: PrefillMeta,
    tolerance: float,
    *,
    mamba2: bool = False,
) -> None:
    before, skip = state.clone(), skips(arguments[2].shape[1], mamba2)
    with kernels():
        out = chunk_gated_delta(*arguments, state, meta, skip=skip)
    assert out.dtype == arguments[2].dtype and out.is_contiguous()
    changed = set(meta.dst_rows)
    for i in range(len(meta)):
        begin, end = meta.cu_seqlens[i], meta.cu_seqlens[i + 1]
        src = meta.src_rows[i]
        first = None if src < 0 else before[src]
        q, k, v, g, beta = (x[begin:end] for x in arguments)
        expected, states = gated_delta_reference(q, k, v, g, beta, first, skip)
        assert_near(out[begin:end], expected, tolerance)
        last = torch.zeros_like(state[0]) if first is None else first
        assert_near(state[meta.dst_rows[i]], states[-1] if end > begin else last, tolerance)
        for sequence, chunk, row in meta.snapshots:
            if sequence == i:
                after = states[meta.chunk_ends[i][chunk] - begin - 1]
                assert_near(state[row], after, tolerance)
                changed.add(row)
    for row in set(range(state.shape[0])) - changed:
        assert torch.equal(state[row].nan_to_num(9), before[row].nan_to_num(9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", quick(range(4), 1, pytest.mark.interpreter))
@pytest.mark.parametrize("mamba2", [False, True])
def test_random_slices(dtype: torch.dtype, seed: int, mamba2: bool) -> None:
    rng = random.Random(seed)
    chunk = rng.choice([16, 32, 64])
    meta, rows = prefill_case(rng, sequences=3, longest=2 * chunk + 5, chunk=chunk)
    heads, dims = rng.choice([(1, 2), (2, 2), (1, 3)]), rng.choice([(32, 32), (48, 32), (32, 40)])
    written = {row for row in meta.src_rows if row >= 0}
    state = state_pool(rows, written, (heads[1], *dims))
    own = inputs(meta.num_tokens, heads, dims, dtype, seed)
    check_prefill(own, state, meta, TOLERANCE[dtype], mamba2=mamba2)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 33, 63])
def test_every_kind_of_tail_after_a_whole_chunk(length: int) -> None:
    total = 64 + length
    meta = PrefillMeta((0, total), (0,), ((),), (-1,), (0,), ((64, total),), ((0, 0, 1),))
    state = state_pool(2, set(), (1, 32, 32))
    check_prefill(inputs(total, (1, 1), (32, 32), seed=length), state, meta, 2e-5)


@pytest.mark.parametrize(
    ("dims", "mamba2"),
    [((128, 128), False), ((256, 64), False), ((64, 256), False), ((256, 64), True)],
)
def test_large_heads(dims: tuple[int, int], mamba2: bool) -> None:
    meta, state = PrefillMeta((0, 20), (0,), ((),), (1,), (1,), ((16, 20),)), (1, *dims)
    check_prefill(inputs(20, (1, 1), dims), state_pool(2, {1}, state), meta, 2e-5, mamba2=mamba2)


def test_repeated_keys_at_full_strength_without_decay_stay_exact() -> None:
    """The hardest system: A is all ones below the diagonal."""
    q, k, v, g, beta = inputs(64, (1, 1), (32, 32))
    k = k[:1].expand(64, 1, 32)
    meta = PrefillMeta((0, 64), (0,), ((),), (-1,), (0,), ((64,),))
    state = state_pool(1, set(), (1, 32, 32))
    check_prefill((q, k, v, g * 0, beta * 0 + 1), state, meta, 2e-5)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mamba2", [False, True])
def test_a_run_resumed_at_a_chunk_end_in_another_batch_has_the_same_bits(
    state_dtype: torch.dtype, mamba2: bool
) -> None:
    arguments, skip = inputs(45, (1, 2), (32, 32), torch.bfloat16), skips(2, mamba2)
    state = state_pool(6, {0}, (2, 32, 32), state_dtype)
    whole = PrefillMeta((0, 45), (0,), ((),), (0,), (1,), ((16, 32, 38, 45),), ((0, 1, 2),))
    tail = [x[32:] for x in arguments]
    resumed = PrefillMeta(
        (0, 0, 13, 26),
        (0, 32, 32),
        ((), (), ()),
        (-1, 2, 2),
        (5, 3, 4),
        ((), (6, 13), (19, 26)),
    )
    with kernels():
        expected = chunk_gated_delta(*arguments, state, whole, skip=skip)
        q, k, v, g, beta = (torch.cat([x, x]) for x in tail)
        out = chunk_gated_delta(q, k, v, g, beta, state, resumed, skip=skip)
    assert torch.equal(out[:13], expected[32:])
    assert torch.equal(out[13:], expected[32:])
    assert torch.equal(state[3], state[1]) and torch.equal(state[4], state[1])
    assert not state[5].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "dims"), [((1, 2), (32, 32)), ((2, 2), (48, 40)), ((1, 1), (256, 64))]
)
@pytest.mark.parametrize("mamba2", [False, True])
def test_decode(
    dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int], mamba2: bool
) -> None:
    meta = DecodeMeta(
        block_tables=((),) * 4,
        kv_lens=(1,) * 4,
        src_rows=(3, -1, 0, 0),
        dst_rows=(3, 1, 5, 6),
        snapshot_rows=(-1, 2, -1, 7),
    )
    arguments, skip = inputs(4, heads, dims, dtype), skips(heads[1], mamba2)
    state = state_pool(9, {0, 3}, (heads[1], *dims))
    before = state.clone()
    with kernels():
        out = recurrent_gated_delta(*arguments, state, meta, skip=skip)
    for i, src in enumerate(meta.src_rows):
        q, k, v, g, beta = (x[i : i + 1] for x in arguments)
        first = None if src < 0 else before[src]
        expected, states = gated_delta_reference(q, k, v, g, beta, first, skip)
        assert_near(out[i : i + 1], expected, TOLERANCE[dtype])
        assert_near(state[meta.dst_rows[i]], states[0], 2e-5)
        if meta.snapshot_rows[i] >= 0:
            assert torch.equal(state[meta.snapshot_rows[i]], state[meta.dst_rows[i]])
    for row in (0, 4, 8):
        assert torch.equal(state[row].nan_to_num(9), before[row].nan_to_num(9))


def test_lengths_of_steps() -> None:
    raw = randn(5, 12, dtype=torch.bfloat16)[:, 3:10]
    arguments = (raw, -randn(7, seed=1).exp(), randn(7, seed=2), (0.3, 1.5))
    expected = step_lengths(*arguments)
    with kernels():
        found = step_lengths(*arguments)
    for got, want in zip(found, expected, strict=True):
        assert_near(got, want, 1e-6)
    assert found[0].min() == torch.tensor(0.3) and found[0].max() == 1.5
