"""The gated delta rule and the recurrence of Mamba2 on the CPU: against transformers, the float64
reference, and bit by bit."""

from __future__ import annotations

import math
import random

import pytest
import torch
from kernel_case import modeling, modeling_mamba2, poisoned_layer, randn, same
from kernel_oracles import gated_delta_reference
from triton_case import assert_near, prefill_case

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.dispatch import compiled_kernels
from vlm_serve.kernels.gated_delta import (
    chunk_gated_delta,
    recurrent_gated_delta,
    step_lengths,
)
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta

pytestmark = pytest.mark.usefixtures("cpu_path")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
HEADS = ((1, 1), (2, 4), (2, 6), (3, 3))
DIMS = ((32, 32), (48, 64), (128, 128), (64, 256))
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make(
    tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Inputs:
    """q, k and v as column ranges of one tensor, as the model cuts them; keys that resemble each
    other, so that the triangular systems are far from the identity."""
    sizes = (heads[0] * dims[0], heads[0] * dims[0], heads[1] * dims[1], 8)
    fused = randn(tokens, sum(sizes), seed=seed)
    fused[:, sizes[0] : 2 * sizes[0]] += 1
    q, k, v, _ = torch.split(fused.to(dtype), list(sizes), dim=1)
    g = -randn(tokens, heads[1], seed=seed + 1).abs() * 0.3
    beta = torch.sigmoid(2 * randn(tokens, heads[1], seed=seed + 2))
    return (
        q.view(tokens, heads[0], dims[0]),
        k.view(tokens, heads[0], dims[0]),
        v.view(tokens, heads[1], dims[1]),
        g,
        beta,
    )


def skips(heads: int, wanted: bool) -> torch.Tensor | None:
    return randn(heads, seed=9) if wanted else None


def part(inputs: Inputs, begin: int, end: int) -> Inputs:
    q, k, v, g, beta = (x[begin:end] for x in inputs)
    return q, k, v, g, beta


def one_sequence(ends: tuple[int, ...], src: int = -1, dst: int = 0) -> PrefillMeta:
    return PrefillMeta((0, ends[-1]), (0,), ((),), (src,), (dst,), (ends,))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("resumed", [False, True])
def test_prefill_equals_transformers(
    dtype: torch.dtype, heads: tuple[int, int], resumed: bool
) -> None:
    tokens, dims = 200, (64, 48)
    inputs = make(tokens, heads, dims, dtype)
    state = poisoned_layer(2, heads[1], *dims)
    first = randn(heads[1], *dims) if resumed else None
    if first is not None:
        state[1] = first
    expected, last = modeling().torch_chunk_gated_delta_rule(
        *(x[None] for x in inputs),
        initial_state=None if first is None else first[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    meta = one_sequence((64, 128, 192, 200), src=1 if resumed else -1)
    out = chunk_gated_delta(*inputs, state, meta)
    assert out.dtype == dtype and out.is_contiguous()
    assert_near(out, expected[0], TOLERANCE[dtype])
    assert_near(state[0], last[0], 3e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("heads", HEADS)
def test_mamba2_equals_transformers(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    """A prefill in two slices, then a decode step, against one chunked scan over all tokens."""
    tokens, dims, limits = 101, (48, 64), (1.2, math.inf)
    c, b, x, _, raw = make(tokens, heads, dims, dtype)
    decay, bias, skip = -randn(heads[1]).exp(), randn(heads[1], seed=5), skips(heads[1], True)
    expected, last = modeling_mamba2().mamba2_chunk_scan(
        x[None].float(),
        raw[None],
        decay,
        b[None].float(),
        c[None].float(),
        chunk_size=32,
        D=skip,
        dt_bias=bias,
        dt_softplus=True,
        dt_limit=limits,
        return_final_states=True,
    )
    lengths, g = step_lengths(raw, decay, bias, limits)
    assert (lengths == torch.tensor(limits[0])).any()
    inputs, state = (c, b, x, g, lengths), poisoned_layer(1, heads[1], *dims)
    outs = [
        chunk_gated_delta(*part(inputs, 0, 70), state, one_sequence((64, 70)), skip=skip),
        chunk_gated_delta(*part(inputs, 70, 100), state, one_sequence((30,), src=0), skip=skip),
    ]
    meta = DecodeMeta(((),), (101,), (0,), (0,), (-1,))
    outs.append(recurrent_gated_delta(*part(inputs, 100, 101), state, meta, skip=skip))
    assert outs[0].dtype == dtype
    assert_near(torch.cat(outs), expected[0], TOLERANCE[dtype])
    assert_near(state[0], last[0].mT, 3e-6)


@pytest.mark.parametrize("mamba2", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(12))
def test_random_batches_equal_the_reference(
    seed: int, state_dtype: torch.dtype, mamba2: bool
) -> None:
    """Empty and one-token sequences, shared and in-place rows, snapshots, everything else NaN."""
    rng = random.Random(seed)
    heads, dims = rng.choice(HEADS), rng.choice(DIMS[:3])
    dtype = rng.choice(FLOATS)
    meta, rows = prefill_case(rng, sequences=5, longest=150, chunk=rng.choice([16, 32, 64]))
    inputs, skip = make(meta.num_tokens, heads, dims, dtype, seed), skips(heads[1], mamba2)
    state = poisoned_layer(rows, heads[1], *dims, dtype=state_dtype)
    for row in {row for row in meta.src_rows if row >= 0}:
        state[row] = randn(heads[1], *dims, seed=row)
    before = state.clone()
    out = chunk_gated_delta(*inputs, state, meta, skip=skip)
    tolerance = 5e-2 if state_dtype == torch.bfloat16 else TOLERANCE[dtype]
    written = set(meta.dst_rows)
    for i, src in enumerate(meta.src_rows):
        begin, end = meta.cu_seqlens[i : i + 2]
        first = None if src < 0 else before[src]
        expected, states = gated_delta_reference(*part(inputs, begin, end), first, skip)
        assert_near(out[begin:end], expected, tolerance)
        if begin == end:
            last = torch.zeros_like(before[0]) if first is None else first
            assert torch.equal(state[meta.dst_rows[i]], last)
        else:
            assert_near(state[meta.dst_rows[i]], states[-1], tolerance)
        for _, chunk, row in (snapshot for snapshot in meta.snapshots if snapshot[0] == i):
            assert_near(state[row], states[meta.chunk_ends[i][chunk] - begin - 1], tolerance)
            written.add(row)
    untouched = [row for row in range(rows) if row not in written]
    assert same(state[untouched], before[untouched])


@pytest.mark.parametrize("mamba2", [False, True])
@pytest.mark.parametrize("dims", DIMS)
def test_compiled_prefills_round_states_after_every_token(
    dims: tuple[int, int], mamba2: bool
) -> None:
    """In bfloat16, as decode steps do, whose state they then have."""
    tokens, heads = 150, (2, 4)
    inputs, skip = make(tokens, heads, dims), skips(heads[1], mamba2)
    state = poisoned_layer(3, heads[1], *dims, dtype=torch.bfloat16)
    state[1] = state[2] = randn(heads[1], *dims)
    by_ops = state.clone()
    with compiled_kernels():
        meta = PrefillMeta((0, 70), (0,), ((),), (1,), (1,), ((33, 70),), ((0, 0, 0),))
        outs = [chunk_gated_delta(*part(inputs, 0, 70), state, meta, skip=skip)]
        rest = PrefillMeta((0, tokens - 70), (70,), ((),), (1,), (1,), ((20, tokens - 70),))
        outs.append(chunk_gated_delta(*part(inputs, 70, tokens), state, rest, skip=skip))
        single = []
        for t in range(tokens):
            step = DecodeMeta(((),), (t + 1,), (2,), (2,), (-1,))
            single.append(recurrent_gated_delta(*part(inputs, t, t + 1), state, step, skip=skip))
            if t == 32:
                assert torch.equal(state[0], state[2])
    assert torch.equal(torch.cat(outs), torch.cat(single))
    assert torch.equal(state[1], state[2])
    with compiled_kernels(False):
        for t in range(tokens):
            step = DecodeMeta(((),), (t + 1,), (2,), (2,), (-1,))
            recurrent_gated_delta(*part(inputs, t, t + 1), by_ops, step, skip=skip)
    assert_near(state[2].float(), by_ops[2].float(), 5e-3)


def random_cuts(rng: random.Random, length: int) -> tuple[int, ...]:
    """Chunk ends at multiples of a chunk size and at random other places."""
    size = rng.choice([16, 32, 64])
    extra = rng.sample(range(1, length + 1), min(length, rng.randint(0, 4)))
    return tuple(sorted({*range(size, length, size), *extra, length}))


def spliced(
    rng: random.Random, parts: list[tuple[Inputs, tuple[int, ...], int, int]]
) -> tuple[Inputs, PrefillMeta, list[int]]:
    """Runs of (inputs, chunk ends, source row, destination row) shuffled into one packed batch,
    with the place of each."""
    order = list(range(len(parts)))
    rng.shuffle(order)
    offsets = [0]
    for which in order:
        offsets.append(offsets[-1] + parts[which][1][-1])
    packed = [torch.cat([parts[which][0][j] for which in order]) for j in range(5)]
    meta = PrefillMeta(
        cu_seqlens=tuple(offsets),
        starts=(0,) * len(parts),
        block_tables=((),) * len(parts),
        src_rows=tuple(parts[which][2] for which in order),
        dst_rows=tuple(parts[which][3] for which in order),
        chunk_ends=tuple(
            tuple(begin + end for end in parts[which][1])
            for begin, which in zip(offsets, order, strict=False)
        ),
    )
    return (
        (packed[0], packed[1], packed[2], packed[3], packed[4]),
        meta,
        [offsets[order.index(which)] for which in range(len(parts))],
    )


@pytest.mark.parametrize(("threads", "cases"), [(1, 180), (2, 60)])
def test_resumed_runs_have_the_bits_of_the_whole(threads: int, cases: int) -> None:
    """240 times: a run resumed at a random chunk end, next to other sequences, against the run that
    went through alone; outputs and final states bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed in range(cases):
            check_resumed_run(random.Random(1000 * threads + seed))
    finally:
        torch.set_num_threads(before)


def check_resumed_run(rng: random.Random) -> None:
    seed = rng.randint(0, 10**6)
    heads, dims = rng.choice(HEADS), rng.choice(DIMS[:2])
    dtype, state_dtype = rng.choice(FLOATS), rng.choice([torch.float32, torch.bfloat16])
    length = rng.randint(2, 300)
    ends = random_cuts(rng, length)
    inputs, skip = make(length, heads, dims, dtype, seed), skips(heads[1], rng.random() < 0.5)
    state = poisoned_layer(12, heads[1], *dims, dtype=state_dtype)
    whole = chunk_gated_delta(*inputs, state, one_sequence(ends, dst=0), skip=skip)
    cut = rng.randint(0, len(ends) - 1)
    middle = ends[cut - 1] if cut else 0
    if middle:
        chunk_gated_delta(
            *part(inputs, 0, middle), state, one_sequence(ends[:cut], dst=1), skip=skip
        )
    rest = tuple(end - middle for end in ends[cut:])
    parts = [(part(inputs, middle, length), rest, 1 if middle else -1, 2)]
    for other in range(rng.randint(0, 4)):
        size = rng.randint(1, 200)
        noise = make(size, heads, dims, dtype, seed + 7 + other)
        parts.append((noise, random_cuts(rng, size), -1, 3 + other))
    packed, meta, places = spliced(rng, parts)
    out = chunk_gated_delta(*packed, state, meta, skip=skip)
    assert torch.equal(out[places[0] : places[0] + length - middle], whole[middle:])
    assert torch.equal(state[2], state[0])


def test_snapshots_equal_the_states_of_separate_runs() -> None:
    inputs = make(150, (2, 4), (32, 32))
    state = poisoned_layer(6, 4, 32, 32)
    ends = (64, 100, 128, 150)
    meta = PrefillMeta((0, 150), (0,), ((),), (-1,), (0,), (ends,), ((0, 1, 3), (0, 3, 4)))
    chunk_gated_delta(*inputs, state, meta)
    chunk_gated_delta(*part(inputs, 0, 100), state, one_sequence((64, 100), dst=1))
    assert torch.equal(state[3], state[1]) and torch.equal(state[4], state[0])


def test_hard_systems_stay_exact() -> None:
    """Equal keys at full strength without decay; decay so strong that exp(-g) would overflow."""
    q, k, v, g, beta = make(64, (1, 1), (32, 32))
    for keys, decay in ((k[:1].expand_as(k), g * 0), (k, g * 0 - 40), (k, g * 100)):
        state = poisoned_layer(1, 1, 32, 32)
        strength = torch.ones_like(beta)
        out = chunk_gated_delta(q, keys, v, decay, strength, state, one_sequence((64,)))
        expected, states = gated_delta_reference(q, keys, v, decay, strength, None)
        assert_near(out, expected, 3e-6)
        assert_near(state[0], states[-1], 3e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("batch", [1, 5])
def test_decode_equals_transformers(dtype: torch.dtype, heads: tuple[int, int], batch: int) -> None:
    dims = (48, 64)
    inputs = make(batch, heads, dims, dtype)
    state = poisoned_layer(12, heads[1], *dims)
    src = (3, -1, 3, 7, 8)[:batch]
    dst = (0, 1, 2, 7, 9)[:batch]
    snapshots = (-1, 10, -1, 11, -1)[:batch]
    for row in (3, 7, 8):
        state[row] = randn(heads[1], *dims, seed=row)
    before = state.clone()
    first = torch.stack([torch.zeros_like(before[0]) if row < 0 else before[row] for row in src])
    expected, last = modeling().torch_recurrent_gated_delta_rule(
        *(x[:, None] for x in inputs),
        initial_state=first,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    meta = DecodeMeta(((),) * batch, (1,) * batch, src, dst, snapshots)
    out = recurrent_gated_delta(*inputs, state, meta)
    assert out.dtype == dtype
    assert_near(out, expected[:, 0], TOLERANCE[dtype])
    for i in range(batch):
        assert_near(state[dst[i]], last[i], 3e-6)
        if snapshots[i] >= 0:
            assert torch.equal(state[snapshots[i]], state[dst[i]])
    untouched = [row for row in range(12) if row not in {*dst, *snapshots}]
    assert same(state[untouched], before[untouched])


def test_decode_continues_a_prefill() -> None:
    """Steps through the recurrence arrive where the chunked form does, in a bfloat16 pool too."""
    inputs = make(20, (2, 4), (32, 32))
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 5e-2)):
        state = poisoned_layer(2, 4, 32, 32, dtype=dtype)
        expected = chunk_gated_delta(*inputs, state, one_sequence((20,)))
        chunk_gated_delta(*part(inputs, 0, 10), state, one_sequence((10,), dst=1))
        meta = DecodeMeta(((),), (1,), (1,), (1,), (-1,))
        for t in range(10, 20):
            out = recurrent_gated_delta(*part(inputs, t, t + 1), state, meta)
            assert_near(out[0], expected[t], tolerance)
        assert_near(state[1], state[0], tolerance)


def test_bad_arguments_are_named() -> None:
    q, k, v, g, beta = make(4, (2, 4), (32, 32))
    state = torch.zeros(3, 4, 32, 32)
    meta = one_sequence((4,))
    bad: dict[str, tuple[Inputs, torch.Tensor, PrefillMeta]] = {
        "k": ((q, k[:, :1], v, g, beta), state, meta),
        "v": ((q, k, v[:, :3], g, beta), state, meta),
        "g": ((q, k, v, g.double(), beta), state, meta),
        "beta": ((q, k, v, g, beta[:3]), state, meta),
        "state": ((q, k, v, g, beta), state.transpose(2, 3), meta),
        "meta.cu_seqlens": ((q, k, v, g, beta), state, one_sequence((3,))),
        "meta.src_rows": ((q, k, v, g, beta), state, one_sequence((4,), src=3)),
        "meta.dst_rows": ((q, k, v, g, beta), state, one_sequence((4,), dst=-1)),
    }
    for name, (inputs, rows, step) in bad.items():
        with pytest.raises(KernelArgumentError, match=name) as error:
            chunk_gated_delta(*inputs, rows, step)
        assert error.value.argument == name
    with pytest.raises(KernelArgumentError, match="meta.dst_rows"):
        meta_twice = DecodeMeta(((),) * 4, (1,) * 4, (-1,) * 4, (0, 1, 1, 2), (-1,) * 4)
        recurrent_gated_delta(q, k, v, g, beta, state, meta_twice)
