"""Prefill of the gated delta rule by another library: the choice, what it refuses, its results.

Its kernels are interpreted where the package is installed.
"""

from __future__ import annotations

import builtins
import importlib.metadata
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_oracles import gated_delta_reference
from triton_case import assert_near, kernels, prefill_case, randn

from vlm_serve.engine.numerics.arithmetic import Backend, decide
from vlm_serve.errors import ConfigError
from vlm_serve.kernels.backends import LIBRARIES, choose, named
from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.gated_delta import chunk_gated_delta, fla
from vlm_serve.kernels.gated_delta.reference import Tokens
from vlm_serve.kernels.metadata import PrefillMeta
from vlm_serve.options.config import EngineConfig

installed = pytest.mark.skipif(bool(fla.problem()), reason=fla.problem())
HEADS, DIMS = (1, 2), (32, 32)
CPU = torch.device("cpu")


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def plus_two(x: torch.Tensor) -> torch.Tensor:
    return x + 2


def for_short_ones(x: torch.Tensor) -> torch.Tensor | None:
    return x + 3 if len(x) < 3 else None


def test_a_chosen_implementation_computes_what_it_takes() -> None:
    op = Op(
        plus_one,
        triton=f"{__name__}:plus_two",
        others={"short": f"{__name__}:for_short_ones", "gone": "no_such_module:at_all"},
    )
    short, long = torch.zeros(2), torch.zeros(4)
    with kernels():
        assert op(CPU, short).tolist() == [2, 2]
        op.choose("short")
        assert op(CPU, short).tolist() == [3, 3] and op(CPU, long).tolist() == [2] * 4
        op.choose(None)
        assert op(CPU, short).tolist() == [2, 2]
        op.choose("gone")
        with pytest.raises(KernelArgumentError, match="no_such_module"):
            op(CPU, short)
        op.choose(None)
    assert op(CPU, short).tolist() == [1, 1]
    with pytest.raises(KernelArgumentError, match="no implementation is called other"):
        op.choose("other")


@pytest.mark.parametrize(
    ("version", "said"),
    [(None, "not installed: pip install fla-core==0.6.0 einops"), ("0.7.1", "fla-core is 0.7.1")],
)
def test_a_start_without_the_library_says_so(
    version: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    gpu = Backend(torch.device("cuda", 0))
    with pytest.raises(ConfigError, match=f"gpu_kernels fla: .*{said}"):
        decide(EngineConfig(gpu_kernels="fla"), torch.bfloat16, gpu)
    assert "chunk_gated_delta by" not in decide(EngineConfig(), torch.bfloat16, gpu).numerics
    fla.pin_tiles.cache_clear()
    with pytest.raises(ConfigError, match=said):
        choose("fla")


def test_the_library_and_its_version_are_in_the_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: fla.VERSION)
    gpu = Backend(torch.device("cuda", 0))
    config = EngineConfig(gpu_kernels="fla")
    numerics = decide(config, torch.bfloat16, gpu).numerics
    assert ", chunk_gated_delta by fla-core 0.6.0, torch" in numerics
    assert "fla" not in decide(config, torch.float32, Backend(CPU)).numerics
    with pytest.raises(ConfigError, match="one GPU"):
        named("fla", ranks=2, deterministic=False)
    with pytest.raises(ConfigError, match="depend on the batch"):
        named("fla", ranks=1, deterministic=True)


def test_options_and_libraries_are_the_same() -> None:
    (field,) = (
        each for each in EngineConfig.__dataclass_fields__.values() if each.name == "gpu_kernels"
    )
    assert tuple(field.metadata["choices"]) == LIBRARIES


def packed(meta: PrefillMeta, dtype: torch.dtype, seed: int = 0) -> Tokens:
    """Keys and queries whose products are about 1."""
    count = meta.num_tokens
    q, k = (randn(count, HEADS[0], DIMS[0], dtype=dtype, seed=seed + i) for i in (1, 2))
    v = randn(count, HEADS[1], DIMS[1], dtype=dtype, seed=seed + 3)
    g = -randn(count, HEADS[1], seed=seed + 4).abs()
    return Tokens(q, k, v, g, torch.sigmoid(randn(count, HEADS[1], seed=seed + 5)))


def pool(rows: int, written: set[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    state = torch.full((rows, HEADS[1], *DIMS), float("nan"), dtype=dtype)
    for row in written:
        state[row] = randn(HEADS[1], *DIMS, seed=row)
    return state


def test_what_it_leaves_to_our_kernel() -> None:
    meta = PrefillMeta((0, 3), (0,), ((),), (-1,), (0,), ((3,),))
    fixed = PrefillMeta((0, 3), (0,), ((),), (-1,), (0,), ((3,),), fixed=True)
    half, wide = packed(meta, torch.float16), packed(meta, torch.float32)
    state = pool(1, set())
    assert fla.chunk_gated_delta(half, state, fixed) is None
    assert fla.chunk_gated_delta(wide, state, meta) is None
    assert fla.chunk_gated_delta(half, state.bfloat16(), meta) is None
    assert fla.chunk_gated_delta(half._replace(skip=randn(HEADS[1])), state, meta) is None
    assert state.isnan().all()


def test_slices_are_cut_behind_their_snapshots() -> None:
    ends = ((64, 100, 164), (), (170, 230))
    meta = PrefillMeta(
        (0, 164, 164, 230), (0,) * 3, ((),) * 3, (-1,) * 3, (1, 2, 3), ends, ((0, 1, 7),)
    )
    first, second = fla._rounds(meta, CPU)
    assert first.sequences == (0, 2) and second.sequences == (0,)
    assert first.rows == ((0, 7), (1, 3)) and second.rows == ((0, 1),)
    # A full chunk and a last one; then one of six tokens with padding, and a last one.
    assert first.offsets.tolist() == [0, 100, 224]
    assert first.chunks.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert first.places is not None and first.tokens is not None
    assert first.places.tolist() == [*range(106), *range(164, 224)]
    assert first.tokens.tolist() == [*range(100), *range(164, 230)]
    assert second.tokens is not None and second.tokens.tolist() == [*range(100, 164)]
    (whole,) = fla._rounds(PrefillMeta((0, 70), (0,), ((),), (-1,), (0,), ((64, 70),)), CPU)
    assert whole.tokens is None and whole.length == 70


class _Number(int):
    """A number of a loop, which a compiler would see as a tensor."""

    def to(self, dtype: Any) -> _Number:
        return self


@pytest.fixture
def interpreted() -> Iterator[None]:
    """The library's kernels chosen, as Triton's interpreter can run them."""
    with warnings.catch_warnings():
        # There is no device.
        warnings.simplefilter("ignore")
        choose("fla")
    loops: Any = sys.modules["fla.ops.common.chunk_delta_h"]
    loops.range = lambda *ends: map(_Number, builtins.range(*map(int, ends)))
    yield
    del loops.range
    choose("own")


@installed
@pytest.mark.parametrize("seed", range(2))
def test_random_slices(seed: int, interpreted: None) -> None:
    meta, rows = prefill_case(random.Random(seed), sequences=3, longest=133, chunk=64)
    state = pool(rows, {row for row in meta.src_rows if row >= 0})
    before, tokens = state.clone(), packed(meta, torch.float16, seed)[:5]
    with kernels():
        out = chunk_gated_delta(*tokens, state, meta)
    changed = set(meta.dst_rows)
    for i, (begin, end) in enumerate(zip(meta.cu_seqlens, meta.cu_seqlens[1:], strict=False)):
        first = None if meta.src_rows[i] < 0 else before[meta.src_rows[i]]
        q, k, v, g, beta = (x[begin:end] for x in tokens)
        expected, states = gated_delta_reference(q, k, v, g, beta, first)
        assert_near(out[begin:end], expected, 4e-3)
        last = torch.zeros_like(state[0]) if first is None else first
        assert_near(state[meta.dst_rows[i]], states[-1] if end > begin else last, 4e-3)
        for sequence, chunk, row in meta.snapshots:
            if sequence == i:
                after = states[meta.chunk_ends[i][chunk] - begin - 1]
                assert_near(state[row], after, 4e-3)
                changed.add(row)
    for row in set(range(rows)) - changed:
        assert torch.equal(state[row].nan_to_num(9), before[row].nan_to_num(9))


@installed
def test_a_run_resumed_at_a_snapshot_has_the_same_bits(interpreted: None) -> None:
    whole = PrefillMeta((0, 150), (0,), ((),), (-1,), (1,), ((64, 100, 150),), ((0, 1, 2),))
    rest = PrefillMeta((0, 50), (100,), ((),), (2,), (3,), ((50,),))
    tokens, state = packed(whole, torch.float16)[:5], pool(4, set())
    with kernels():
        out = chunk_gated_delta(*tokens, state, whole)
        q, k, v, g, beta = (x[100:] for x in tokens)
        resumed = chunk_gated_delta(q, k, v, g, beta, state, rest)
    assert torch.equal(resumed, out[100:]) and torch.equal(state[3], state[1])
