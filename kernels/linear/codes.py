"""Quantised weights as read from every checkpoint format: codes, with their scales and zero points.

A weight is `[N, K]`; scales and zero points are per row and group of `group` consecutive k, or per
block. Packing, nibble order and offsets of the file formats are already undone here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

FLOAT4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Values of e2m1 numbers by their codes, doubled so that they are integers."""


@dataclass(frozen=True, slots=True)
class IntegerCodes:
    """Integer or e2m1 codes with their scales.

    The weight is `(codes[n, k] - zeros[n, k // group]) * scales[n, k // group]`, or for e2m1
    `FLOAT4_VALUES[codes[n, k]] * scales[n, k // group]`.

    Scales of one byte have an additional factor per row. Scales of type int8 are roots: q stands
    for `factors[n] * q * |q|`. If the factor is a power of two, this is a float32 number in less
    space, exactly. Products then have the bits of those with float32 scales, as long as every
    intermediate sum is a normal number.

    Attributes:
        codes: uint8 `[N, K]`, 0 … 2**bits - 1.
        scales: float32, bfloat16, float16, int8, float8_e4m3fn or float8_e8m0fnu `[N, K / group]`.
        zeros: uint8 `[N, K / group]`; `2**(bits - 1)` everywhere if None.
        bits: 4, 6 or 8.
        group: values per scale; divides K.
        factors: float32 `[N]` beside scales of one byte, powers of two beside int8; None beside
            others.
        float4: True if codes are e2m1 numbers; they have 4 bits and no zeros.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group: int
    factors: torch.Tensor | None = None
    float4: bool = False

    def of_columns(self, columns: range) -> IntegerCodes:
        """Select some k of all rows; a cut through a group makes groups smaller, exactly."""
        group = math.gcd(self.group, columns.start, len(columns))
        chosen = torch.arange(columns.start, columns.stop, group) // self.group
        zeros = None if self.zeros is None else self.zeros[:, chosen]
        codes = self.codes[:, columns.start : columns.stop]
        return replace(self, codes=codes, scales=self.scales[:, chosen], zeros=zeros, group=group)


def scale_values(scales: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Return the values of integer codes' scales, with their factors: float32 `[N, groups]`."""
    wide = scales.float()
    if scales.dtype == torch.int8:
        wide *= wide.abs()
    return wide if factors is None else wide * factors[:, None]


@dataclass(frozen=True, slots=True)
class Float8Codes:
    """float8 codes with scales per block.

    The weight is `codes[n, k] * scales[n // block[0], k // block[1]]`.

    Attributes:
        codes: float8_e4m3fn `[N, K]`.
        scales: float32 or bfloat16 `[ceil(N / block[0]), ceil(K / block[1])]`.
        block: rows and columns of one scale; `(1, K)` for a scale per output channel.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]


Codes = IntegerCodes | Float8Codes
