"""Quantised weights as read from every checkpoint format: codes, with their scales and zero points.

A weight is `[N, K]`; scales and zero points are per row and group of `group` consecutive k, or per
block. Packing, nibble order and offsets of the file formats are already undone here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

FLOAT4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Values of e2m1 numbers by their codes, doubled so that they are integers."""
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of llama.cpp's four-bit codes. Triton's kernels, which know no tables, take eight bits."""


@dataclass(frozen=True, slots=True)
class Outer:
    """The outer of two levels of scales.

    Attributes:
        scales: float16 `[N, K / size]`, factors of scales.
        floors: float16 `[N, K / size]`, factors of zero points, which become minima; or None.
        size: values per number, a multiple of the group's.
    """

    scales: torch.Tensor
    floors: torch.Tensor | None
    size: int

    def of_columns(self, columns: torch.Tensor, run: int) -> Outer:
        """Select some k of all rows, see `IntegerCodes.of_columns`."""
        size = math.gcd(self.size, run)
        chosen = columns[::size] // self.size
        floors = None if self.floors is None else self.floors[:, chosen]
        return Outer(self.scales[:, chosen], floors, size)

    def times(self, inner: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Return the exact products of a group's numbers with `scales` or `floors`, float32."""
        return inner.float() * factors.float().repeat_interleave(
            inner.shape[1] // factors.shape[1], 1
        )


@dataclass(frozen=True, slots=True)
class IntegerCodes:
    """Integer codes, e2m1 codes, or codes that are places in a table, with their scales.

    The weight is `(codes[n, k] - zeros[n, k // group]) * scales[n, k // group]`, or for e2m1
    `FLOAT4_VALUES[codes[n, k]] * scales[n, k // group]`; with a table likewise.

    Scales of one byte have an additional factor per row. Scales of type int8 are roots: q stands
    for `factors[n] * q * |q|`. If the factor is a power of two, this is a float32 number in less
    space, exactly. Products then have the bits of those with float32 scales, as long as every
    intermediate sum is a normal number.

    With two levels, scales are int8 numbers as they are, times those of `outer`. With floors, a
    value is `codes * scale - minimum`, and a minimum is a zero point times its floor.

    Attributes:
        codes: uint8 `[N, K]`, 0 … 2**bits - 1.
        scales: float32, bfloat16, float16, int8, float8_e4m3fn or float8_e8m0fnu `[N, K / group]`.
        zeros: uint8 `[N, K / group]`; `2**(bits - 1)` everywhere if None.
        bits: 4, 6 or 8; of places in a table 2, 3 or 4.
        group: values per scale; divides K.
        factors: float32 `[N]` beside scales of one byte, powers of two beside int8; None beside
            others, and beside two levels unless there is a table.
        float4: True if codes are e2m1 numbers; they have 4 bits and no zeros.
        outer: the second level of int8 scales; None: there is one level.
        table: the values of codes, whole numbers from -127 on, up to 16; there are no zeros then.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group: int
    factors: torch.Tensor | None = None
    float4: bool = False
    outer: Outer | None = None
    table: tuple[int, ...] | None = None

    @property
    def values_of_codes(self) -> tuple[int, ...] | None:
        """Return the values of codes that are looked up; None: they are numbers."""
        return FLOAT4_VALUES if self.float4 else self.table

    @property
    def floored(self) -> bool:
        """Return True if zero points are minima."""
        return self.outer is not None and self.outer.floors is not None

    def of_columns(self, columns: range | torch.Tensor) -> IntegerCodes:
        """Select some k of all rows, exactly: a range, or int64 in any order. A cut through a group
        makes groups smaller."""
        if isinstance(columns, range):
            codes, run = self.codes[:, columns.start : columns.stop], len(columns)
            run, columns = math.gcd(run, columns.start), torch.arange(columns.start, columns.stop)
        else:
            codes, run = self.codes[:, columns], _run_of(columns)
        group = math.gcd(self.group, run)
        chosen = columns[::group] // self.group
        return replace(
            self,
            codes=codes,
            scales=self.scales[:, chosen],
            zeros=None if self.zeros is None else self.zeros[:, chosen],
            group=group,
            outer=None if self.outer is None else self.outer.of_columns(columns, run),
        )

    def flat(self) -> IntegerCodes:
        """Return the same codes with one level of scales, float32. They have no floors."""
        if self.outer is None:
            return self
        assert not self.floored, "minima have no one-level form"
        scales = self.outer.times(self.scales, self.outer.scales)
        if self.factors is not None:
            scales *= self.factors[:, None]
        return replace(self, scales=scales, outer=None, factors=None)

    def wide(self) -> IntegerCodes:
        """Return the same values as codes of eight bits, with one level of scales."""
        if self.table is None:
            return self
        codes = (self.codes.new_tensor(self.table, dtype=torch.int16) + 128).to(torch.uint8)
        return replace(self.flat(), codes=codes[self.codes.long()], bits=8, table=None)

    def values(self) -> torch.Tensor:
        """Return the weight, float32 `[N, K]`."""
        wide, looked_up = self.codes.float(), self.values_of_codes
        if looked_up is not None:
            wide = wide.new_tensor(looked_up)[self.codes.long()]
        wide = wide.view(len(wide), -1, self.group)
        outer = self.outer
        if outer is not None and outer.floors is not None and self.zeros is not None:
            minima = outer.times(self.zeros, outer.floors)
            scales = outer.times(self.scales, outer.scales)
            return (wide * scales[..., None] - minima[..., None]).flatten(1)
        if outer is not None:
            return self.flat().values()
        if self.zeros is not None:
            wide = wide - self.zeros.float()[..., None]
        elif looked_up is None:
            wide = wide - (1 << (self.bits - 1))
        return (wide * scale_values(self.scales, self.factors)[..., None]).flatten(1)


def _run_of(order: torch.Tensor) -> int:
    """Return the largest size of aligned runs that an order of columns moves together."""
    starts = torch.nonzero(order[1:] != order[:-1] + 1).flatten() + 1
    return math.gcd(len(order), *starts.tolist(), *order[starts].tolist())


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

    bits: ClassVar[int] = 8
    floored: ClassVar[bool] = False

    @property
    def group(self) -> int:
        """Values per scale within a row."""
        return min(self.block[1], self.codes.shape[1])

    def values(self) -> torch.Tensor:
        """Return the weight, float32 `[N, K]`."""
        rows, columns = self.codes.shape
        scales = self.scales.float().repeat_interleave(self.block[0], 0)[:rows]
        return self.codes.float() * scales.repeat_interleave(self.block[1], 1)[:, :columns]


Codes = IntegerCodes | Float8Codes
