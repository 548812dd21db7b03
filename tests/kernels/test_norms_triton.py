"""RMS norms on the Triton path against their float64 references."""

from __future__ import annotations

import pytest
import torch
from kernel_oracles import gated_rms_norm_reference, rms_norm_reference
from triton_case import TOLERANCE, assert_near, heads_of, kernels, randn

from vlm_serve.kernels.norms import gated_rms_norm, gated_squares, rms_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (1, 64), (2, 3, 40), (0, 64)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], seed=1)
    with kernels():
        result = rms_norm(x, weight, 1e-6)
    assert result.dtype == dtype
    assert_near(result, rms_norm_reference(x, weight, 1e-6), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_strided_rows(dtype: torch.dtype) -> None:
    x = randn(5, 200, dtype=dtype)[:, 8:104]
    weight = randn(96, dtype=dtype, seed=1)
    with kernels():
        normed = rms_norm(x, weight, 1e-5)
    assert_near(normed, rms_norm_reference(x, weight, 1e-5), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(3, 4, 32), (7, 5, 128), (2, 3, 80)])
@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_rms_norm_reads_heads_out_of_a_fused_projection(
    dtype: torch.dtype, tokens: int, heads: int, dim: int, gate_first: bool
) -> None:
    fused = randn(tokens, 3 * heads * dim, dtype=dtype)
    gate = heads_of(fused[:, heads * dim : 2 * heads * dim], heads)
    x, weight = randn(tokens, heads, dim, dtype=dtype, seed=3), randn(dim, dtype=dtype, seed=1)
    with kernels():
        result = gated_rms_norm(x, gate, weight, 1e-6, gate_first=gate_first)
        flat = gated_rms_norm(
            x.view(-1, dim), gate.reshape(-1, dim), weight, 1e-6, gate_first=gate_first
        )
    expected = gated_rms_norm_reference(x, gate, weight, 1e-6, gate_first)
    assert_near(result, expected, TOLERANCE[dtype])
    assert torch.equal(flat.view(result.shape), result)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_before_norms_of_heads_with_factors_of_their_own(dtype: torch.dtype) -> None:
    x, gate = randn(3, 2, 80, dtype=dtype), randn(3, 2, 80, dtype=dtype, seed=1)
    weight = randn(2, 80, seed=2)
    with kernels():
        result = gated_rms_norm(x, gate, weight, 1e-6, gate_first=True)
    expected = gated_rms_norm_reference(x, gate, weight, 1e-6, gate_first=True)
    assert_near(result, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_have_parts_of_a_row(dtype: torch.dtype) -> None:
    """A part has the norm of the whole row if it is given the squares of all parts."""
    fused, weight = randn(3, 240, dtype=dtype), randn(160, seed=2)
    gate, x = fused[:, None, :160], randn(3, 1, 160, dtype=dtype, seed=1)
    parts = [slice(0, 80), slice(80, 160)]
    with kernels():
        squares = torch.cat([gated_squares(x[..., own], gate[..., own]) for own in parts], 1)
        mean = (squares.sum(1, keepdim=True) / 160).repeat(1, 2)[:, 1:]
        results = [
            gated_rms_norm(
                x[..., own], gate[..., own], weight[own], 1e-6, gate_first=True, mean=mean
            )
            for own in parts
        ]
    assert squares.dtype == torch.float32
    expected = gated_rms_norm_reference(x, gate, weight, 1e-6, gate_first=True)
    assert_near(torch.cat(results, -1), expected, TOLERANCE[dtype])
