"""Candidates for the Triton path, which do not serve: right in the interpreter.

On a GPU they are checked by `benchmarks/gpu_candidates.py`, each combination in a process of its
own: one that reads out of bounds would end the tests beside it.
"""

from __future__ import annotations

import pytest
import torch
from triton_case import assert_near, kernels, poison, randn

from benchmarks.candidates.convolution import convolve
from benchmarks.candidates.inverse import invert_chunks
from benchmarks.candidates.prepare import prepare_chunks
from benchmarks.candidates.scan import scan
from vlm_serve.kernels.causal_conv import causal_conv_prefill
from vlm_serve.kernels.gated_delta import chunk_gated_delta
from vlm_serve.kernels.gated_delta.chunk_triton import EPS
from vlm_serve.kernels.gated_delta.chunk_triton import prepare_chunks as serving_chunks
from vlm_serve.kernels.gated_delta.tokens import Tokens
from vlm_serve.kernels.metadata import PrefillMeta
from vlm_serve.kernels.triton_support import interpreted

pytestmark = pytest.mark.skipif(not interpreted(), reason="gpu_candidates.py checks them there")

HEADS, DIM = 2, 40


def tokens(count: int, shared: float, decay: float) -> Tokens:
    """Tokens whose keys have a part in common; one key head for both value heads."""
    k = randn(count, 1, DIM) + shared * randn(1, 1, DIM, seed=1)
    v = randn(count, HEADS, DIM)
    g = -decay * randn(count, HEADS, seed=2).abs()
    return Tokens(k, k, v, g, torch.sigmoid(3 * randn(count, HEADS, seed=3)) + 0.05)


def expected(packed: Tokens, head: int) -> torch.Tensor:
    k, g, beta = packed.k[:, 0].double(), packed.g[:, head].double(), packed.beta[:, head].double()
    unit = k * torch.rsqrt((k * k).sum(1, keepdim=True) + EPS.value)
    total = g.cumsum(0)
    system = beta[:, None] * torch.exp(total[:, None] - total) * (unit @ unit.T)
    one = torch.eye(len(k), dtype=torch.float64, device=k.device)
    inverse: torch.Tensor = torch.linalg.inv(one + torch.tril(system, -1))
    return inverse


@pytest.mark.parametrize("count", [1, 16, 37, 64])
@pytest.mark.parametrize(("shared", "decay"), [(0.0, 0.2), (4.0, 0.01), (1000.0, 0.0)])
def test_inverses_are_as_exact_as_float32(count: int, shared: float, decay: float) -> None:
    """With forward substitution of 32 rows, the worst of such cases had 1.7e-6."""
    packed = tokens(64 + count, shared, decay)
    meta = PrefillMeta((0, 64 + count), (0,), ((),), (-1,), (0,), ((64, 64 + count),))
    with kernels():
        inverse = invert_chunks(packed, meta)
    assert not inverse.triu(1).any()
    for chunk, part in enumerate((slice(0, 64), slice(64, None))):
        own = Tokens(*(x[part] for x in packed))
        size = own.k.shape[0]
        for head in range(HEADS):
            assert_near(inverse[chunk, head, :size, :size], expected(own, head), 1.5e-6)


def test_padded_chunks_are_left_alone() -> None:
    packed = tokens(20, 1.0, 0.1)
    meta = PrefillMeta((0, 20), (0,), ((),), (-1,), (0,), ((20,),))
    with kernels():
        whole = invert_chunks(packed, meta)
        bounds = meta.tensors["chunk_bounds"]
        meta.tensors["chunk_bounds"] = torch.cat([bounds, bounds[-1:]])
        assert torch.equal(invert_chunks(packed, meta)[0], whole[0])


def two_sequences() -> PrefillMeta:
    """The second one resumes from a kept state; one state is kept in the middle."""
    return PrefillMeta(
        (0, 70, 90), (0, 64), ((), ()), (-1, 0), (1, 2), ((40, 70), (90,)), ((0, 0, 3),)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scan_that_loads_first_has_the_bits_of_the_one_that_serves(dtype: torch.dtype) -> None:
    packed, state = tokens(90, 1.0, 0.1), randn(4, HEADS, DIM, DIM)
    packed = packed._replace(**{name: getattr(packed, name).to(dtype) for name in "qkv"})
    packed = packed._replace(beta=packed.beta.to(dtype))
    ours = state.clone()
    with kernels():
        expected = chunk_gated_delta(*packed, state, two_sequences())
        meta = two_sequences()
        columns = 16 if dtype == torch.float32 else 32
        out = scan(packed, serving_chunks(packed, meta), ours, meta, columns, 4)
    assert torch.equal(out, expected) and torch.equal(ours, state)


def test_chunks_are_prepared_alike_but_for_the_inverse() -> None:
    packed = tokens(90, 1.0, 0.1)
    with kernels():
        expected = serving_chunks(packed, two_sequences())
        made = prepare_chunks(packed, two_sequences(), None, 4)
        meta = two_sequences()
        apart = prepare_chunks(packed, meta, invert_chunks(packed, meta), 4)
    for name, part in expected.items():
        assert torch.equal(made[name], part), name
        assert_near(apart[name], part, 2e-6)


@pytest.mark.parametrize("span", [16, 64])
def test_a_convolution_of_whole_chunks_has_the_bits_of_the_one_that_serves(span: int) -> None:
    x, weight = randn(90, 130), randn(130, 4, seed=1)
    tails = poison(4, 130, 3)
    tails[0] = randn(130, 3, seed=2)
    with kernels():
        out = convolve(x, weight, tails, two_sequences(), span)
        expected = causal_conv_prefill(x, weight, tails, two_sequences())
    assert torch.equal(out, expected)
