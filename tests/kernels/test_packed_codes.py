"""Packed codes: values against the product with dequantised weights, quantised activations against
whole numbers, a row's bits in any company, and what lies in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quantised_codes import dequantised, float4, rooted, widened

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear.codes import FLOAT4_VALUES, Codes, Float8Codes, IntegerCodes
from vlm_serve.kernels.linear.packed_codes import PackedCodes

COLUMNS, DEPTH = 77, 256
CUTS = (5, 40)
ROWS = (1, 2, 3, 4, 5, 12, 13, 24, 64, 193)

pytestmark = pytest.mark.usefixtures("compiler")


def integers(
    bits: int, group: int, *, zeros: bool, scales: torch.dtype = torch.bfloat16
) -> IntegerCodes:
    random = torch.Generator().manual_seed(bits + group)
    codes = torch.randint(0, 2**bits, (COLUMNS, DEPTH), dtype=torch.uint8, generator=random)
    scale = torch.rand(COLUMNS, DEPTH // group, generator=random).to(scales) / 64
    scale[3, 0] = 0
    zero = torch.randint(0, 2**bits, scale.shape, dtype=torch.uint8, generator=random)
    return IntegerCodes(codes, scale, zero if zeros else None, bits, group)


def floats8(block: tuple[int, int], scales: torch.dtype = torch.bfloat16) -> Float8Codes:
    """All codes that are numbers, and random ones."""
    random = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (COLUMNS, DEPTH), dtype=torch.uint8, generator=random)
    codes[0] = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 3
    shape = -(-COLUMNS // block[0]), DEPTH // block[1]
    scale = torch.rand(shape, generator=random).to(scales) / 64
    return Float8Codes(codes.view(torch.float8_e4m3fn), scale, block)


def value(codes: Codes) -> torch.Tensor:
    """float64 `[N, K]`."""
    if isinstance(codes, IntegerCodes) and codes.float4:
        return dequantised(codes)
    scales = codes.scales.double()
    if isinstance(codes, Float8Codes):
        wide = scales.repeat_interleave(codes.block[0], 0)[:COLUMNS]
        return codes.codes.double() * wide.repeat_interleave(codes.block[1], 1)
    middle = torch.full_like(scales, 2.0 ** (codes.bits - 1))
    zeros = middle if codes.zeros is None else codes.zeros.double()
    steps = codes.codes.double() - zeros.repeat_interleave(codes.group, 1)
    return steps * scales.repeat_interleave(codes.group, 1)


def cut(codes: IntegerCodes) -> list[IntegerCodes]:
    """The same in pieces of some rows each."""
    rows = [slice(*ends) for ends in ((0, CUTS[0]), CUTS, (CUTS[1], COLUMNS))]
    return [
        replace(
            codes,
            codes=codes.codes[own],
            scales=codes.scales[own],
            zeros=None if codes.zeros is None else codes.zeros[own],
            factors=None if codes.factors is None else codes.factors[own],
        )
        for own in rows
    ]


def packed(codes: Codes, bias: torch.Tensor | None = None, *, dynamic: bool = False) -> PackedCodes:
    """From pieces, wherever they are cut; blocks of rows stay whole."""
    if isinstance(codes, Float8Codes):
        return PackedCodes.of([codes], COLUMNS, DEPTH, bias)
    return PackedCodes.of(cut(codes), COLUMNS, DEPTH, bias, dynamic=dynamic)


def activations(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(rows, DEPTH, generator=torch.Generator().manual_seed(2))
    x[0, :32] = 0  # a group of nothing
    x[-1] *= 1000
    return x.to(dtype)


INTEGERS = [
    integers(bits, group, zeros=zeros)
    for bits in (4, 8)
    for group in (16, 32, 64, 128, 256)
    for zeros in (False, True)
]
INTEGERS += [integers(4, 32, zeros=True, scales=kind) for kind in (torch.float16, torch.float32)]
INTEGERS += [integers(6, group, zeros=zeros) for group in (16, 32, 128) for zeros in (False, True)]
FLOATS4 = [
    float4(COLUMNS, DEPTH, group, scales)
    for scales in (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    for group in (16, 32, 64)
]
FLOATS8 = [
    floats8((128, 128)),
    floats8((1, 256)),
    floats8((32, 64), torch.float32),
]


@pytest.mark.parametrize("codes", [*INTEGERS, *FLOATS4, *FLOATS8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_product_with_dequantised_weights(codes: Codes, dtype: torch.dtype) -> None:
    x, weight = activations(193, dtype), value(codes)
    bias = torch.randn(COLUMNS, generator=torch.Generator().manual_seed(3))
    expected = x.double() @ weight.T
    size = (x.double().abs() @ weight.abs().T).clamp(min=1e-30)
    got = packed(codes)(x)
    assert got.dtype == dtype
    exact = 1e-6 if dtype == torch.float32 else 2**-8
    assert float(((got.double() - expected).abs() / size).max()) < exact
    biased = packed(codes, bias)(x).double()
    assert float(((biased - expected - bias).abs() / (size + bias.abs())).max()) < exact


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, 32), (4, 256), (6, 32), (8, 128)])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_of_one_byte_have_the_bits_of_those_in_float32(
    zeros: bool, bits: int, group: int, dynamic: bool, dtype: torch.dtype
) -> None:
    codes = rooted(COLUMNS, DEPTH, bits, group, zeros=zeros)
    bias = torch.randn(COLUMNS, generator=torch.Generator().manual_seed(3)) / 64
    x = activations(193, dtype)
    for offset in (None, bias):
        byte = packed(codes, offset, dynamic=dynamic)
        wide = packed(widened(codes), offset, dynamic=dynamic)
        assert byte.nbytes < wide.nbytes
        for rows in (1, 2, 5, 13, 193):
            some = x[-rows:]
            assert torch.equal(byte(some), wide(some)), (rows, offset)
            assert torch.equal(byte(some, activation="silu"), wide(some, activation="silu"))
            assert torch.equal(byte.gated(byte, some), wide.gated(wide, some))
    expected = x.double() @ dequantised(codes).T
    size = x.double().abs() @ dequantised(codes).abs().T
    exact = 2**-8 if dtype == torch.bfloat16 else 1e-6
    if not dynamic:
        got = packed(codes)(x).double()
        assert float(((got - expected).abs() / size.clamp(min=1e-30)).max()) < exact


def quantised(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers int64 and float32 scales, per row and group."""
    grouped = x.float().view(len(x), -1, group)
    top = grouped.abs().amax(-1)
    most = torch.full_like(top, 127.0)  # A number by a tensor is not a division of torch's.
    inverse = torch.where(top > 1e-30, most / top, 0.0)
    return (grouped * inverse[..., None]).round().long(), torch.where(top > 1e-30, top / most, 0.0)


def in_whole_numbers(codes: IntegerCodes, x: torch.Tensor) -> torch.Tensor:
    """Groups of integers, then one fused multiply-add for each of them; float32."""
    group = min(codes.group, 32)
    whole, x_scales = quantised(x, group)
    times = codes.group // group
    scales = codes.scales.float().repeat_interleave(times, 1)
    middle = torch.full(codes.scales.shape, 2.0 ** (codes.bits - 1))
    zeros = (middle if codes.zeros is None else codes.zeros).long().repeat_interleave(times, 1)
    steps = codes.codes.long().view(COLUMNS, -1, group) - zeros[..., None]
    if codes.float4:
        steps = torch.tensor(FLOAT4_VALUES)[codes.codes.long()].view(COLUMNS, -1, group)
    total = torch.zeros(len(x), COLUMNS)
    for g in range(DEPTH // group):
        dots = whole[:, g] @ steps[:, g].T
        factor = x_scales[:, g, None] * scales[:, g]
        # One rounding, as of a fused multiply-add: both are exact in float64.
        total = (dots.double() * factor.double() + total.double()).float()
    return total if codes.factors is None else total * codes.factors


@pytest.mark.parametrize("codes", [*INTEGERS, *FLOATS4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_activations_meet_codes_in_whole_numbers(
    codes: IntegerCodes, dtype: torch.dtype
) -> None:
    """Bit by bit."""
    x = activations(13, dtype)
    expected = in_whole_numbers(codes, x).to(dtype)
    for rows in (1, 2, 13):
        assert torch.equal(packed(codes, dynamic=True)(x[:rows]), expected[:rows]), rows


@pytest.mark.parametrize("codes", [*INTEGERS, *FLOATS4])
def test_the_largest_codes_fit_the_sums_of_every_processor(codes: IntegerCodes) -> None:
    """Groups of nothing but the largest and the smallest codes and activations."""
    random = torch.Generator().manual_seed(5)
    ends = torch.randint(0, 2, codes.codes.shape, generator=random)
    most = torch.tensor([15, 7] if codes.float4 else [0, 2**codes.bits - 1])
    ends[1], ends[2] = 0, 1
    extreme = replace(codes, codes=most[ends].to(torch.uint8))
    x = torch.randint(0, 2, (13, DEPTH), generator=random) * 2.0 - 1
    x[1], x[2] = 1, -1
    expected = in_whole_numbers(extreme, x)
    for rows in (slice(2, 3), slice(1, 3), slice(0, 3), slice(0, 13)):
        assert torch.equal(packed(extreme, dynamic=True)(x[rows]), expected[rows]), rows


@pytest.mark.parametrize(
    "codes",
    [INTEGERS[3], INTEGERS[4], INTEGERS[14], *INTEGERS[-4:-2], *FLOATS4[::4], *FLOATS8[:2]],
)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_has_the_bits_it_has_among_many(
    codes: Codes, dynamic: bool, dtype: torch.dtype
) -> None:
    weight, x = packed(codes, dynamic=dynamic), activations(400, dtype)
    other = torch.randn(400, COLUMNS, generator=torch.Generator().manual_seed(4)).to(dtype)
    whole = weight(x), weight(x, activation="silu"), weight(x, plus=other)
    threads = torch.get_num_threads()
    for rows in ROWS:
        for start in (0, 400 - rows):
            part = slice(start, start + rows)
            torch.set_num_threads(1 + rows % 3)
            few = x[part]
            own = weight(few), weight(few, activation="silu"), weight(few, plus=other[part])
            torch.set_num_threads(threads)
            for some, all_rows in zip(own, whole, strict=True):
                assert torch.equal(some, all_rows[part]), (rows, start)


@pytest.mark.parametrize("dynamic", [False, True])
def test_numbers_that_are_none_are_not_hidden(dynamic: bool) -> None:
    weight, x = packed(integers(8, 32, zeros=False), dynamic=dynamic), activations(3)
    x[1, 40], x[2, 7] = float("nan"), float("inf")
    got = weight(x)
    assert got[0].isfinite().all()
    assert not got[1:].isfinite().any(dim=1).all()


@pytest.mark.parametrize(("bits", "most"), [(8, 1.0), (6, 0.75), (4, 0.5)])
@pytest.mark.parametrize("zeros", [False, True])
def test_memory_is_that_of_codes_and_scales(bits: int, most: float, zeros: bool) -> None:
    codes = torch.zeros(64, 1024, dtype=torch.uint8)
    scales = torch.ones(64, 8, dtype=torch.float16)
    zero = torch.zeros(64, 8, dtype=torch.uint8) if zeros else None
    weight = PackedCodes.of([IntegerCodes(codes, scales, zero, bits, 128)], 64, 1024)
    stored = codes.numel() * most + scales.nbytes + (scales.numel() * bits / 8 if zeros else 0)
    assert stored <= weight.nbytes <= 1.05 * stored


def test_what_cannot_be_packed() -> None:
    codes = integers(4, 32, zeros=False)
    other = integers(4, 64, zeros=False)
    with pytest.raises(KernelArgumentError, match="kinds or groups differ"):
        PackedCodes.of([codes, other], 2 * COLUMNS, DEPTH)
    with pytest.raises(KernelArgumentError, match="kinds or groups differ"):
        PackedCodes.of([codes, float4(COLUMNS, DEPTH, 32)], 2 * COLUMNS, DEPTH)
    with pytest.raises(KernelArgumentError, match="types of scales differ"):
        PackedCodes.of([codes, rooted(COLUMNS, DEPTH, 4, 32)], 2 * COLUMNS, DEPTH)
    odd = IntegerCodes(codes.codes[:, :20], codes.scales[:, :1], None, 4, 20)
    with pytest.raises(KernelArgumentError, match="20 of 20, expected a multiple of 16"):
        PackedCodes.of([odd], COLUMNS, 20)
