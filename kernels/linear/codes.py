"""Quantised weights as every checkpoint format is read: codes and what gives them their values.

A weight is `[N, K]`; scales and zero points are per row and group of `group` consecutive k, or per
block. Packing, nibble order and the offsets of file formats end where these begin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class IntegerCodes:
    """`(codes[n, k] - zeros[n, k // group]) * scales[n, k // group]`.

    Scales of one byte are roots: q stands for `factors[n] * q * |q|`. That is a float32 number
    stored in less, exactly: products have the bits of those with it, as long as no sum on the way
    is too small or too large to be a normal number.

    Attributes:
        codes: uint8 `[N, K]`, 0 … 2**bits - 1.
        scales: float32, bfloat16, float16 or int8 `[N, K / group]`.
        zeros: uint8 `[N, K / group]`; `2**(bits - 1)` everywhere if None.
        bits: 4 or 8.
        group: values of one scale; divides K.
        factors: float32 `[N]`, powers of two, beside int8 scales; None beside others.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group: int
    factors: torch.Tensor | None = None

    def of_columns(self, columns: range) -> IntegerCodes:
        """Some k of all rows; a cut through a group makes groups as small as it needs, exactly."""
        group = math.gcd(self.group, columns.start, len(columns))
        chosen = torch.arange(columns.start, columns.stop, group) // self.group
        zeros = None if self.zeros is None else self.zeros[:, chosen]
        codes = self.codes[:, columns.start : columns.stop]
        return IntegerCodes(codes, self.scales[:, chosen], zeros, self.bits, group, self.factors)


def scale_values(scales: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """float32 `[N, groups]`: what scales of integer codes, and their factors, stand for."""
    wide = scales.float()
    return wide if factors is None else wide * wide.abs() * factors[:, None]


@dataclass(frozen=True, slots=True)
class Float8Codes:
    """`codes[n, k] * scales[n // block[0], k // block[1]]`.

    Attributes:
        codes: float8_e4m3fn `[N, K]`.
        scales: float32 or bfloat16 `[ceil(N / block[0]), ceil(K / block[1])]`.
        block: rows and columns of one scale; `(1, K)` for a scale per output channel.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]


Codes = IntegerCodes | Float8Codes
