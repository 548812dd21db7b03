"""Random quantised weights, and what they stand for."""

from __future__ import annotations

from dataclasses import replace

import torch

from vlm_serve.kernels.linear.codes import (
    FLOAT4_VALUES,
    Codes,
    Float8Codes,
    IntegerCodes,
    scale_values,
)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def integers(
    columns: int,
    depth: int,
    bits: int,
    group: int,
    *,
    zeros: bool = False,
    scales: torch.dtype = torch.float32,
) -> IntegerCodes:
    codes = torch.randint(2**bits, (columns, depth), generator=generator(1), dtype=torch.uint8)
    shape = (columns, depth // group)
    offsets = torch.randint(2**bits, shape, generator=generator(2), dtype=torch.uint8)
    factors = torch.rand(shape, generator=generator(3)).to(scales) / 2**bits
    return IntegerCodes(codes, factors, offsets if zeros else None, bits, group)


def rooted(columns: int, depth: int, bits: int, group: int, *, zeros: bool = False) -> IntegerCodes:
    """The same codes with scales of one byte, and rows whose scales are far apart."""
    plain = integers(columns, depth, bits, group, zeros=zeros)
    shape = (columns, depth // group)
    roots = torch.randint(-128, 128, shape, generator=generator(5), dtype=torch.int8)
    exponents = torch.randint(-34, -20, (columns,), generator=generator(6))
    return replace(plain, scales=roots, factors=torch.ldexp(torch.ones(columns), exponents))


def float4(
    columns: int, depth: int, group: int, scales: torch.dtype = torch.float8_e4m3fn
) -> IntegerCodes:
    """Every code, with scales from the smallest on and rows whose factors are no powers of two."""
    plain = integers(columns, depth, 4, group)
    if scales == torch.float8_e8m0fnu:
        exponents = torch.randint(110, 130, plain.scales.shape, generator=generator(7))
        kept = exponents.byte().view(scales)
    else:
        kept = (torch.rand(plain.scales.shape, generator=generator(7)) ** 8 * 448).to(scales)
    factors = (torch.rand(columns, generator=generator(8)) + 0.5) / 64
    return replace(plain, scales=kept, factors=factors, float4=True)


def widened(codes: IntegerCodes) -> IntegerCodes:
    """Codes with scales of one byte as codes with the float32 scales that those are."""
    scales = scale_values(codes.scales, codes.factors)
    return replace(codes, scales=scales, factors=None)


def float8(
    columns: int, depth: int, block: tuple[int, int], scales: torch.dtype = torch.float32
) -> Float8Codes:
    codes = (randn(columns, depth) * 60).to(torch.float8_e4m3fn)
    shape = (-(-columns // block[0]), -(-depth // block[1]))
    factors = torch.rand(shape, generator=generator(4)).to(scales) / 100
    return Float8Codes(codes, factors, block)


def dequantised(codes: Codes) -> torch.Tensor:
    """float64, element by element."""
    columns, depth = codes.codes.shape
    rows, places = torch.arange(columns)[:, None], torch.arange(depth)[None, :]
    wide = codes.codes.double()
    if isinstance(codes, Float8Codes):
        return wide * codes.scales.double()[rows // codes.block[0], places // codes.block[1]]
    groups = places // codes.group
    scales = scale_values(codes.scales, codes.factors).double()[rows, groups]
    if codes.float4:
        return torch.tensor(FLOAT4_VALUES).double()[codes.codes.long()] * scales
    middle = 2.0 ** (codes.bits - 1)
    zeros = middle if codes.zeros is None else codes.zeros.double()[rows, groups]
    return (wide - zeros) * scales
