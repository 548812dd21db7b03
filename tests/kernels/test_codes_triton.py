"""Quantised projections on the Triton path, against dequantised weights."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from quantised_codes import dequantised, float4, float8, integers, rooted, widened
from sweeps import quick
from triton_case import DEVICE, assert_near, kernels, randn, row_by_row

from vlm_serve.kernels.linear import codes_triton
from vlm_serve.kernels.linear.codes import Codes
from vlm_serve.kernels.linear.torch_quantised import TorchQuantised
from vlm_serve.kernels.triton_support import Target

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
CASES: list[Codes] = [
    integers(37, 256, 8, 128),
    integers(70, 96, 8, 32, zeros=True, scales=torch.float16),
    integers(5, 100, 8, 100, scales=torch.bfloat16),
    integers(40, 256, 4, 128, scales=torch.float16),
    integers(65, 96, 4, 32, zeros=True),
    integers(33, 72, 4, 72, zeros=True, scales=torch.bfloat16),
    rooted(40, 96, 4, 32),
    rooted(40, 96, 6, 32),
    integers(33, 80, 6, 16, zeros=True),
    integers(20, 256, 6, 128, scales=torch.bfloat16),
    float4(24, 48, 16),
    float4(20, 64, 32, torch.float8_e8m0fnu),
    float8(130, 260, (128, 128), torch.bfloat16),
    float8(37, 72, (1, 72)),
]


def linear(codes: Codes, bias: torch.Tensor | None = None) -> TorchQuantised:
    columns, depth = codes.codes.shape
    return TorchQuantised.of([codes], columns, depth, bias, DEVICE)


@pytest.mark.parametrize("codes", CASES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", quick([0, 1, 19, 70], [19], pytest.mark.interpreter))
def test_equals_the_product_with_dequantised_weights(
    codes: Codes, dtype: torch.dtype, rows: int
) -> None:
    columns, depth = codes.codes.shape
    wide = randn(rows, depth + 8, dtype=dtype)
    x, bias, plus = wide[:, :depth], randn(columns, seed=1), randn(rows, columns, dtype=dtype)
    expected = x.double().cpu() @ dequantised(codes).T + bias.double().cpu()
    with kernels():
        projection = linear(codes, bias)
        for deterministic in (False, True):
            out = projection(x, deterministic=deterministic)
            assert out.dtype == dtype
            assert_near(out, expected, TOLERANCE[dtype])
        added = projection(x, plus=plus)
        active = projection(x, activation="silu")
    assert_near(added, expected + plus.double().cpu(), TOLERANCE[dtype])
    assert_near(active, torch.nn.functional.silu(expected), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_scales_of_one_byte_have_the_bits_of_those_in_float32(dtype: torch.dtype) -> None:
    codes, x = rooted(40, 96, 4, 32, zeros=True), randn(19, 96, dtype=dtype)
    with kernels():
        assert torch.equal(linear(codes)(x), linear(widened(codes))(x))


@pytest.mark.parametrize("codes", CASES[-2:])
def test_float8_by_integer_arithmetic(codes: Codes) -> None:
    x = randn(9, codes.codes.shape[1])
    with kernels():
        converted = linear(codes)(x)
        with patch.object(codes_triton, "current_target", lambda: Target("cuda", 90)):
            assert torch.equal(linear(codes)(x), converted)
    assert_near(converted, x.double().cpu() @ dequantised(codes).T, 1e-5)


@pytest.mark.parametrize("codes", CASES[:4])
def test_deterministic_bits_do_not_depend_on_the_other_rows(codes: Codes) -> None:
    x = randn(80, codes.codes.shape[1])
    with kernels(), row_by_row():
        projection = linear(codes)
        whole = projection(x, deterministic=True)
        for rows in (slice(0, 1), slice(11, 30), slice(70, 80)):
            assert torch.equal(projection(x[rows], deterministic=True), whole[rows])
