"""Codes with two levels of scales: the values and bits of those with one, minima, and what they
take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quantised_codes import generator, randn

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear.codes import IntegerCodes, Outer
from vlm_serve.kernels.linear.packed_codes import PackedCodes
from vlm_serve.kernels.linear.torch_quantised import TorchQuantised

COLUMNS, DEPTH = 77, 512
ROWS = (1, 2, 3, 5, 13, 50)


def two_levels(bits: int, group: int, size: int, *, floors: bool) -> IntegerCodes:
    codes = torch.randint(2**bits, (COLUMNS, DEPTH), generator=generator(1), dtype=torch.uint8)
    shape = COLUMNS, DEPTH // group
    scales = torch.randint(-128, 128, shape, generator=generator(2), dtype=torch.int8)
    outer = (torch.rand(COLUMNS, DEPTH // size, generator=generator(3)) / 1000).half()
    scales[3, 0] = outer[5, 1] = 0
    if not floors:
        return IntegerCodes(codes, scales, None, bits, group, outer=Outer(outer, None, size))
    minima = torch.randint(64, shape, generator=generator(4), dtype=torch.uint8)
    floor = (torch.rand(COLUMNS, DEPTH // size, generator=generator(5)) / 100).half()
    kept = Outer(outer, floor, size)
    return IntegerCodes(codes, scales, minima, bits, group, outer=kept)


def values(codes: IntegerCodes) -> torch.Tensor:
    """float64 `[N, K]`, number by number."""
    outer = codes.outer
    assert outer is not None
    scales = codes.scales.double().repeat_interleave(codes.group, 1)
    scales *= outer.scales.double().repeat_interleave(outer.size, 1)
    if outer.floors is None or codes.zeros is None:
        return (codes.codes.double() - 2.0 ** (codes.bits - 1)) * scales
    minima = codes.zeros.double().repeat_interleave(codes.group, 1)
    return codes.codes.double() * scales - minima * outer.floors.double().repeat_interleave(
        outer.size, 1
    )


FORMS = [
    pytest.param(4, 32, 256, True, id="Q4_K"),
    pytest.param(6, 32, 256, True, id="Q5_K"),
    pytest.param(6, 16, 256, False, id="Q6_K"),
    pytest.param(6, 16, 128, False, id="a half of Q6_K"),
    pytest.param(4, 16, 32, True, id="a small part of Q4_K"),
]


@pytest.mark.parametrize(("bits", "group", "size", "floors"), FORMS)
def test_their_values(bits: int, group: int, size: int, floors: bool) -> None:
    codes = two_levels(bits, group, size, floors=floors)
    wanted = values(codes)
    assert torch.equal(codes.values(), wanted.float())
    for columns in (range(128, 256), range(64, 512), range(240, 256)):
        own = codes.of_columns(columns)
        assert torch.equal(own.values(), wanted[:, columns.start : columns.stop].float())
        assert own.outer is not None and own.outer.size % own.group == 0


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("bits", "group", "size", "floors"), FORMS)
def test_products(bits: int, group: int, size: int, floors: bool, dynamic: bool) -> None:
    codes = two_levels(bits, group, size, floors=floors)
    weight = PackedCodes.of(iter([codes]), COLUMNS, DEPTH, None, dynamic=dynamic)
    wanted, x = values(codes), randn(max(ROWS), DEPTH, seed=7)
    exact = x.double() @ wanted.T
    for rows in ROWS:
        out = weight(x[:rows])
        error = (out.double() - exact[:rows]).abs().max() / exact.abs().max()
        assert error < (2e-2 if dynamic else 1e-6)
        assert torch.equal(weight(x[rows - 1 : rows]), out[-1:])


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("size", [256, 128])
def test_without_minima_they_have_the_bits_of_one_level(size: int, dynamic: bool) -> None:
    codes = two_levels(6, 16, size, floors=False)
    both, one = (
        PackedCodes.of(iter([each]), COLUMNS, DEPTH, None, dynamic=dynamic)
        for each in (codes, codes.flat())
    )
    x = randn(50, DEPTH, seed=8)
    for rows in ROWS:
        assert torch.equal(both(x[:rows]), one(x[:rows]))
    assert both.nbytes < one.nbytes


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dynamic", [False, True])
def test_minima_that_are_zero_points(dynamic: bool) -> None:
    """Scales that are powers of two make whole zero points of minima."""
    codes = two_levels(4, 32, 256, floors=True)
    ones = torch.full((COLUMNS, DEPTH // 256), 2.0**-6, dtype=torch.float16)
    codes = replace(codes, scales=torch.ones_like(codes.scales), outer=Outer(ones, ones, 256))
    plain = replace(codes, scales=torch.full(codes.scales.shape, 2.0**-6), outer=None)
    x = randn(13, DEPTH, seed=9)
    minima, zeros = (
        PackedCodes.of(iter([each]), COLUMNS, DEPTH, None, dynamic=dynamic)(x)
        for each in (codes, plain)
    )
    assert (minima - zeros).abs().max() < 2e-6 * zeros.abs().max()


@pytest.mark.usefixtures("compiler")
def test_what_they_take() -> None:
    """Of whole panels: 4.625 bits for Q4_K, 6.5625 for Q6_K."""
    for bits, group, floors, wanted in ((4, 32, True, 4.625), (6, 16, False, 6.5625)):
        codes = two_levels(bits, group, 256, floors=floors)
        weight = PackedCodes.of(iter([codes]), COLUMNS, DEPTH, None)
        assert weight.nbytes * 8 == wanted * 96 * DEPTH


def test_eight_bits_have_no_minima() -> None:
    codes = two_levels(8, 32, 256, floors=True)
    with pytest.raises(KernelArgumentError, match="codes of 8 bits have no minima"):
        PackedCodes.of(iter([codes]), COLUMNS, DEPTH, None)


def test_torch_takes_one_level() -> None:
    codes = two_levels(6, 16, 256, floors=False)
    weight = TorchQuantised.of(iter([codes]), COLUMNS, DEPTH)
    x = randn(3, DEPTH, seed=10)
    exact = x.double() @ values(codes).T
    assert (weight(x).double() - exact).abs().max() < 1e-6 * exact.abs().max()
