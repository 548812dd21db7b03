"""Quantised projections of torch: values against dequantised weights, what they take in memory, and
a row's bits in any company."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from quantised_codes import dequantised, float4, float8, integers, randn, rooted, widened

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear.codes import Codes, IntegerCodes
from vlm_serve.kernels.linear.torch_quantised import TorchQuantised

CASES: list[Codes] = [
    integers(37, 128, 8, 128),
    integers(37, 192, 8, 32, zeros=True, scales=torch.float16),
    integers(1, 96, 8, 96, scales=torch.bfloat16),
    integers(40, 128, 4, 128, scales=torch.float16),
    integers(33, 192, 4, 32, zeros=True),
    integers(200, 256, 4, 64, zeros=True, scales=torch.bfloat16),
    rooted(70, 128, 4, 32),
    rooted(70, 128, 6, 32),
    integers(33, 96, 6, 48, zeros=True),
    float4(37, 96, 16),
    float4(37, 96, 32, torch.float8_e8m0fnu),
    float8(130, 260, (128, 128), torch.bfloat16),
    float8(37, 64, (1, 64)),
    float8(37, 64, (1, 128)),
]


def linear(codes: Codes, bias: torch.Tensor | None = None) -> TorchQuantised:
    columns, depth = codes.codes.shape
    return TorchQuantised.of([codes], columns, depth, bias)


@pytest.mark.parametrize("codes", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_product_with_dequantised_weights(codes: Codes, dtype: torch.dtype) -> None:
    columns, depth = codes.codes.shape
    plain, bias = dequantised(codes), randn(columns, seed=5)
    bare, biased = linear(codes), linear(codes, bias)
    assert (bare.columns, bare.depth, bare.record()) == (columns, depth, None)
    x = randn(50, depth, seed=6, dtype=dtype)
    expected = x.double() @ plain.T
    # Relative to what a row's sum would be if nothing cancelled.
    size = x.double().abs() @ plain.T.abs()
    bound = size * 1e-5 + (0 if dtype == torch.float32 else expected.abs() * 2**-8)
    for rows in (0, 1, 3, 50):
        got = bare(x[:rows])
        assert got.dtype == dtype and got.shape == (rows, columns)
        assert bool(((got.double() - expected[:rows]).abs() <= bound[:rows]).all())
    if dtype == torch.float32:
        apart = (biased(x).double() - expected - bias.double()).abs()
        assert bool((apart <= bound + 1e-6).all())


@pytest.mark.parametrize("codes", CASES[3:7])
def test_what_follows_the_product(codes: Codes) -> None:
    columns, depth = codes.codes.shape
    x, other = randn(9, depth, seed=1) / 8, randn(9, columns, seed=2)
    bias = randn(columns, seed=3)
    projection, product = linear(codes, bias), x.double() @ dequantised(codes).T + bias.double()
    cases = (
        (projection(x, activation="silu"), F.silu(product)),
        (projection(x, activation="gelu"), F.gelu(product)),
        (projection(x, activation="gelu_tanh"), F.gelu(product, approximate="tanh")),
        (projection(x, activation="relu2"), F.relu(product).square()),
        (projection(x, times=other), product * other.double()),
        (projection(x, plus=other), product + other.double()),
        (projection.gated(projection, x), F.silu(product) * product),
    )
    for got, expected in cases:
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(KernelArgumentError, match="at most one"):
        projection(x, activation="silu", plus=other)
    with pytest.raises(KernelArgumentError, match="expected .T, "):
        projection(x[:, 1:])


def test_pieces_lie_below_each_other() -> None:
    """Also where a block of rows is cut off by the end of a piece."""
    for codes in (integers(40, 64, 4, 32, zeros=True), integers(40, 64, 8, 64)):
        zeros = codes.zeros
        pieces = [
            IntegerCodes(
                codes.codes[rows],
                codes.scales[rows],
                None if zeros is None else zeros[rows],
                codes.bits,
                codes.group,
            )
            for rows in (slice(0, 7), slice(7, 40))
        ]
        x = randn(20, 64)
        assert torch.equal(TorchQuantised.of(pieces, 40, 64)(x), linear(codes)(x))
    first, second = float8(10, 64, (4, 32)), float8(9, 64, (8, 32))
    x = randn(20, 64)
    plain = torch.cat([dequantised(first), dequantised(second)])
    got = TorchQuantised.of([first, second], 19, 64)(x)
    torch.testing.assert_close(got.double(), x.double() @ plain.T, atol=1e-4, rtol=1e-5)


def test_scales_of_one_byte_have_the_bits_of_those_in_float32() -> None:
    codes, x = rooted(40, 128, 4, 32), randn(20, 128)
    assert torch.equal(linear(codes)(x), linear(widened(codes))(x))


def test_codes_take_what_they_take() -> None:
    for bits in (4, 6):
        codes = 256 * 512 * bits // 8
        assert linear(rooted(256, 512, bits, 32)).nbytes == codes + 256 * 16 + 256 * 4
    bias = randn(256)
    four = linear(integers(256, 512, 4, 128, zeros=True, scales=torch.float16), bias)
    assert four.nbytes == 256 * 512 // 2 + 256 * 4 * 3 + 256 * 4
    assert linear(integers(256, 512, 8, 128)).nbytes == 256 * 512 + 256 * 4 * 4
    assert linear(float8(256, 512, (128, 128), torch.bfloat16)).nbytes == 256 * 512 + 256 * 4 * 2


def _torch_keeps_bits() -> bool:
    x, weight = randn(300, 2304, seed=1), randn(272, 2304)
    return torch.equal(F.linear(x, weight)[:16], F.linear(x[:16], weight))


@pytest.mark.parametrize("codes", [*CASES[2:], integers(272, 2304, 8, 128)])
def test_deterministic_rows(codes: Codes) -> None:
    if not _torch_keeps_bits():
        pytest.skip("torch's products on this processor depend on the number of rows")
    columns, depth = codes.codes.shape
    projection = linear(codes)
    x, other = randn(300, depth, seed=1), randn(300, columns, seed=2)

    def products(rows: slice) -> list[torch.Tensor]:
        part = x[rows]
        return [
            projection(part, deterministic=True),
            projection(part, activation="silu", deterministic=True),
            projection(part, activation="gelu", deterministic=True),
            projection(part, activation="gelu_tanh", deterministic=True),
            projection(part, plus=other[rows], deterministic=True),
            projection.gated(projection, part, deterministic=True),
        ]

    whole = products(slice(0, 300))
    for rows in (1, 2, 5, 15, 16, 17, 64, 299):
        for start in (0, 300 - rows):
            part = slice(start, start + rows)
            for some, all_rows in zip(products(part), whole, strict=True):
                assert torch.equal(some, all_rows[part]), (rows, start)


def test_codes_that_do_not_fit() -> None:
    four, eight = integers(8, 64, 4, 32), integers(8, 64, 8, 32)
    apart: list[list[Codes]] = [[four, eight], [four, CASES[9]], [float8(8, 64, (1, 64)), four]]
    for pieces in apart:
        with pytest.raises(KernelArgumentError, match="all of one weight must be of one kind"):
            TorchQuantised.of(pieces, 16, 64)
    for wrong, problem in (
        (IntegerCodes(four.codes, four.scales, None, 3, 32), r"\(4, 6, 8\) are known, got 3"),
        (IntegerCodes(four.codes, four.scales, None, 4, 48), "48 does not divide 64"),
        (IntegerCodes(four.codes, four.scales, None, 4, 1), "1 codes of 4 bits fill no whole"),
        (IntegerCodes(four.codes, four.scales, None, 6, 2), "2 codes of 6 bits fill no whole"),
    ):
        with pytest.raises(KernelArgumentError, match=problem):
            linear(wrong)
    with pytest.raises(KernelArgumentError, match="8 rows, expected 9"):
        TorchQuantised.of([four], 9, 64)
