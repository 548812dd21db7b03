"""The causal convolution on the CPU: against transformers, a float64 reference, and bit by bit."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_case import modeling, poisoned_layer, randn, same
from kernel_oracles import causal_conv_reference
from triton_case import assert_near, prefill_case

from vlm_serve.kernels.causal_conv import causal_conv_decode, causal_conv_prefill
from vlm_serve.kernels.causal_conv.reference import Behind
from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta

pytestmark = pytest.mark.usefixtures("cpu_path")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def one_sequence(length: int, src: int = -1, dst: int = 0) -> PrefillMeta:
    ends = tuple(range(64, length, 64)) + (length,)
    return PrefillMeta((0, length), (0,), ((),), (src,), (dst,), (ends,))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 100])
def test_prefill_and_decode_equal_transformers(dtype: torch.dtype, length: int) -> None:
    channels, width = 72, 4
    x, weight = randn(length + 1, channels, dtype=dtype), randn(channels, width, dtype=dtype)
    tails = poisoned_layer(2, channels, width - 1, dtype=dtype)
    out = causal_conv_prefill(x[:length], weight, tails, one_sequence(length))
    expected = modeling().causal_conv1d_fn(x.T[None], weight, activation="silu")[0].T
    assert_near(out, expected[:length], 2 * TOLERANCE[dtype])
    meta = DecodeMeta(((),), (1,), (0,), (0,), (1,))
    tail = tails[0].clone()
    step = causal_conv_decode(x[length:], weight, tails, meta)
    last = modeling().causal_conv1d_update(
        x[length:].T[None], tail[None], weight, activation="silu"
    )
    assert_near(step, last[0].T, 2 * TOLERANCE[dtype])
    assert_near(step[0], expected[length], 2 * TOLERANCE[dtype])
    assert torch.equal(tails[1], tails[0])


@pytest.mark.parametrize("seed", range(12))
def test_random_batches_equal_the_reference(seed: int) -> None:
    """Empty and one-token sequences, slices shorter than the kernel, shared and in-place rows."""
    rng = random.Random(seed)
    dtype, channels, width = rng.choice(FLOATS), rng.choice([8, 40, 96]), rng.choice([2, 3, 4, 7])
    meta, rows = prefill_case(rng, sequences=6, longest=60, chunk=rng.choice([16, 32]))
    fused = randn(meta.num_tokens, channels + 5, dtype=dtype, seed=seed)
    x, weight = fused[:, :channels], randn(channels, width, dtype=dtype, seed=seed)
    tails = poisoned_layer(rows, channels, width - 1, dtype=dtype)
    for row in {row for row in meta.src_rows if row >= 0}:
        tails[row] = randn(channels, width - 1, dtype=dtype, seed=row)
    before = tails.clone()
    bias = randn(channels, dtype=dtype, seed=7) if seed % 3 else None
    behind = Behind(bias, silu=seed % 2 == 0)
    out = causal_conv_prefill(x, weight, tails, meta, behind)
    assert out.dtype == dtype and out.is_contiguous()
    written = set(meta.dst_rows)
    for i, src in enumerate(meta.src_rows):
        begin, end = meta.cu_seqlens[i : i + 2]
        expected, history = causal_conv_reference(
            x[begin:end], weight, None if src < 0 else before[src], behind
        )
        assert_near(out[begin:end], expected, TOLERANCE[dtype])
        assert torch.equal(tails[meta.dst_rows[i]], history[-1])
        for _, chunk, row in (snapshot for snapshot in meta.snapshots if snapshot[0] == i):
            assert torch.equal(tails[row], history[meta.chunk_ends[i][chunk] - begin])
            written.add(row)
    untouched = [row for row in range(rows) if row not in written]
    assert same(tails[untouched], before[untouched])


@pytest.mark.parametrize("dtype", FLOATS)
def test_without_silu_and_with_a_bias_it_equals_transformers(dtype: torch.dtype) -> None:
    x, weight, bias = (randn(*shape, dtype=dtype) for shape in ((50, 48), (48, 3), (48,)))
    tails = poisoned_layer(1, 48, 2, dtype=dtype)
    behind = Behind(bias, silu=False)
    out = causal_conv_prefill(x[:49], weight, tails, one_sequence(49), behind)
    meta = DecodeMeta(((),), (1,), (0,), (0,), (-1,))
    step = causal_conv_decode(x[49:], weight, tails, meta, behind)
    expected = modeling().causal_conv1d_fn(x.T[None], weight, bias)[0].T
    assert_near(torch.cat([out, step]), expected, 4 * TOLERANCE[dtype])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_token_has_the_same_bits_wherever_it_is_computed(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed in range(30):
            check_cut(random.Random(seed))
    finally:
        torch.set_num_threads(before)


def check_cut(rng: random.Random) -> None:
    dtype, channels = rng.choice(FLOATS), rng.choice([24, 100, 1024])
    length = rng.randint(2, 400)
    cut = rng.randint(1, length - 1)
    x, weight = randn(length, channels, dtype=dtype), randn(channels, 4, dtype=dtype)
    tails = poisoned_layer(4, channels, 3, dtype=dtype)
    whole = causal_conv_prefill(x, weight, tails, one_sequence(length))
    head = causal_conv_prefill(x[:cut], weight, tails, one_sequence(cut, dst=1))
    noise = randn(rng.randint(1, 90), channels, dtype=dtype, seed=1)
    begin, end = len(noise), len(noise) + length - cut
    meta = PrefillMeta((0, begin, end), (0, 0), ((), ()), (-1, 1), (2, 3), ((begin,), (end,)))
    # Chunks longer than 64 tokens are of no concern to the convolution, only to its checks.
    meta.checked.add(("PrefillMeta", end, 4))
    rest = causal_conv_prefill(torch.cat([noise, x[cut:]]), weight, tails, meta)[begin:]
    assert torch.equal(torch.cat([head, rest]), whole)
    assert torch.equal(tails[3], tails[0])


def test_decode_batch_reads_and_writes_its_rows() -> None:
    x, weight = randn(4, 40), randn(40, 4)
    tails = poisoned_layer(10, 40, 3)
    for row in (2, 5):
        tails[row] = randn(40, 3, seed=row)
    before = tails.clone()
    src, dst, snapshots = (2, -1, 2, 5), (0, 1, 3, 5), (-1, 7, -1, 9)
    meta = DecodeMeta(((),) * 4, (1,) * 4, src, dst, snapshots)
    out = causal_conv_decode(x, weight, tails, meta)
    for i in range(4):
        tail = None if src[i] < 0 else before[src[i]]
        expected, history = causal_conv_reference(x[i : i + 1], weight, tail)
        assert_near(out[i], expected[0], 1e-6)
        assert torch.equal(tails[dst[i]], history[1])
        if snapshots[i] >= 0:
            assert torch.equal(tails[snapshots[i]], history[1])
    untouched = [4, 6, 8, 2]
    assert same(tails[untouched], before[untouched])


def test_bad_arguments_are_named() -> None:
    x, weight, tails = randn(4, 8), randn(8, 4), torch.zeros(2, 8, 3)
    meta = one_sequence(4)
    for name, arguments in {
        "x": (x.double(), weight, tails, meta),
        "weight": (x, weight[:7], tails, meta),
        "tails": (x, weight, tails[:, :, :2], meta),
        "meta.cu_seqlens": (x, weight, tails, one_sequence(5)),
        "meta.dst_rows": (x, weight, tails, one_sequence(4, dst=2)),
    }.items():
        with pytest.raises(KernelArgumentError, match=name) as error:
            causal_conv_prefill(*arguments)
        assert error.value.argument == name
    with pytest.raises(KernelArgumentError, match="behind.bias"):
        causal_conv_prefill(x, weight, tails, meta, Behind(randn(7)))
    with pytest.raises(KernelArgumentError, match="meta.snapshot_rows"):
        causal_conv_decode(x, weight, tails, DecodeMeta(((),), (1,), (0,) * 4, (1,) * 4, ()))
