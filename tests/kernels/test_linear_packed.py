"""Packed weights: the same products, and the same bits of a row in any batch of 16 rows or more."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear import blocks, linear, pack

pytestmark = pytest.mark.usefixtures("cpu_path")

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
    atol, rtol = (4e-6 * shape[1] ** 0.5, 0.0) if single else (1e-2, 2**-8)
    for rows in (0, 1, 3, 40):
        plain = linear(x[:rows], packed)
        assert plain.dtype == dtype and plain.shape == (rows, shape[0])
        torch.testing.assert_close(plain.double(), expected[:rows], atol=atol, rtol=rtol)
        biased = linear(x[:rows], packed, bias)
        torch.testing.assert_close(
            biased.double(), expected[:rows] + bias.double(), atol=atol, rtol=rtol
        )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_what_follows_the_product(packed: bool, dtype: torch.dtype, rows: int) -> None:
    plain = (torch.randn(48, 64) / 8).to(dtype)
    x, other, bias = (torch.randn(n).to(dtype) for n in ((rows, 64), (rows, 48), (48,)))
    weight = pack(plain) if packed else plain
    product = x.double() @ plain.double().T + bias.double()
    tolerance = 1e-5 if dtype == torch.float32 else 0.04
    cases = (
        (linear(x, weight, bias, activation="silu"), F.silu(product)),
        (linear(x, weight, bias, activation="gelu"), F.gelu(product)),
        (linear(x, weight, bias, activation="gelu_tanh"), F.gelu(product, approximate="tanh")),
        (linear(x, weight, bias, times=other), product * other.double()),
        (linear(x, weight, bias, plus=other), product + other.double()),
    )
    for got, expected in cases:
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)
    with pytest.raises(KernelArgumentError, match="at most one"):
        linear(x, weight, activation="silu", plus=other)


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
    x, other = torch.randn(300, shape[1]).to(dtype), torch.randn(300, shape[0]).to(dtype)

    def products(part: slice) -> list[torch.Tensor]:
        return [
            linear(x[part], packed, deterministic=True),
            linear(x[part], packed, activation="silu", deterministic=True),
            linear(x[part], packed, activation="gelu", deterministic=True),
            linear(x[part], packed, activation="gelu_tanh", deterministic=True),
            linear(x[part], packed, times=other[part], deterministic=True),
            linear(x[part], packed, plus=other[part], deterministic=True),
        ]

    whole = products(slice(300))
    for rows in (1, 2, 5, 15, 16, 17, 64, 299):
        for start in (0, 300 - rows):
            part = slice(start, start + rows)
            for some, all_rows in zip(products(part), whole, strict=True):
                assert torch.equal(some, all_rows[part]), (rows, start)


@pytest.mark.parametrize("shape", [*SHAPES, (64, 33), (130, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_a_packed_weight_lies(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Every element, read from memory as compiled kernels read it."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed = pack(weight)
    place = blocks(packed)
    if place is None:
        pytest.skip("oneDNN packs in another way on this processor")
    count, pair = -(-shape[0] // 64), 4 // dtype.itemsize
    size = count * 64 * place.depth * dtype.itemsize
    memory = (ctypes.c_uint8 * size).from_address(place.address)
    laid = torch.frombuffer(memory, dtype=dtype).view(count, place.depth // pair, 64, pair)
    rows = laid.transpose(1, 2).reshape(count * 64, place.depth)
    assert torch.equal(rows[: shape[0], : shape[1]], weight)
    assert not rows[shape[0] :].any() and not rows[:, shape[1] :].any()


def test_a_plain_weight_has_no_blocks() -> None:
    assert blocks(torch.ones(64, 64)) is None
