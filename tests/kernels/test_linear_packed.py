"""Packed weights: the same products, and the same bits of a row in any batch of 16 rows or more."""

from __future__ import annotations

import pytest
import torch

from vlm_serve.kernels.linear import linear, pack

SHAPES = [(1, 64), (37, 65), (200, 64), (48, 300), (272, 2304)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_product_of_the_plain_weight(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    x = torch.randn(40, shape[1], generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    packed = pack(weight)
    assert packed.shape == weight.shape
    expected = x.double() @ weight.double().T
    single = dtype == torch.float32
    limits = {"atol": 4e-6 * shape[1] ** 0.5 if single else 1e-2, "rtol": 0 if single else 2**-8}
    for rows in (0, 1, 3, 40):
        plain = linear(x[:rows], packed)
        assert plain.dtype == dtype and plain.shape == (rows, shape[0])
        torch.testing.assert_close(plain.double(), expected[:rows], **limits)
        biased = linear(x[:rows], packed, bias)
        torch.testing.assert_close(biased.double(), expected[:rows] + bias.double(), **limits)


def test_strided_rows_are_read_in_place() -> None:
    weight, wide = torch.randn(24, 32), torch.randn(20, 96)
    x = wide[:, 32:64]
    torch.testing.assert_close(linear(x, pack(weight)), x @ weight.T, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_rows_do_not_depend_on_the_batch(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    packed = pack(torch.randn(shape).to(dtype))
    x = torch.randn(300, shape[1]).to(dtype)
    whole = linear(x, packed, deterministic=True)
    for rows in (1, 2, 5, 15, 16, 17, 64, 299):
        for start in (0, 300 - rows):
            part = linear(x[start : start + rows], packed, deterministic=True)
            assert torch.equal(part, whole[start : start + rows]), (rows, start)
