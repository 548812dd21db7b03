"""Quantised weights as every checkpoint format is read: codes and what gives them their values.

A weight is `[N, K]`; scales and zero points are per row and group of `group` consecutive k, or per
block. Packing, nibble order and the offsets of file formats end where these begin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class IntegerCodes:
    """`(codes[n, k] - zeros[n, k // group]) * scales[n, k // group]`.

    Attributes:
        codes: uint8 `[N, K]`, 0 … 2**bits - 1.
        scales: float32, bfloat16 or float16 `[N, K / group]`.
        zeros: uint8 `[N, K / group]`; `2**(bits - 1)` everywhere if None.
        bits: 4 or 8.
        group: values of one scale; divides K.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group: int


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
