"""Rows of blocks, taken apart into codes with their scales and minima, and the helpers of that."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlm_serve.kernels.linear.codes import FLOAT4_VALUES


@dataclass(frozen=True, slots=True)
class Decoded:
    """Rows of blocks, taken apart. Without `inner`, `outer` are the scales themselves.

    Attributes:
        codes: uint8 `[n, K]`.
        bits: of the codes.
        group: values per scale.
        outer: float16, float8_e4m3fn or float8_e8m0fnu `[n, K / values of a block]`.
        inner: int16 `[n, K / group]`, factors of `outer`.
        floor, floors: float16 and int16 like `outer` and `inner`: their product is subtracted.
        table: the values of codes; None: they are numbers.
        factor: of all scales, exact.
    """

    codes: torch.Tensor
    bits: int
    group: int
    outer: torch.Tensor
    inner: torch.Tensor | None = None
    floor: torch.Tensor | None = None
    floors: torch.Tensor | None = None
    table: tuple[int, ...] | None = None
    factor: float = 1.0

    @property
    def float4(self) -> bool:
        """Return True if codes are e2m1 numbers."""
        return self.table is FLOAT4_VALUES

    @property
    def finite(self) -> bool:
        """Return True if all scales are numbers."""
        given = [scales for scales in (self.outer, self.floor) if scales is not None]
        return all(bool(scales.float().isfinite().all()) for scales in given)

    def scales(self) -> torch.Tensor:
        """Return float32 `[n, K / group]`, of codes less the middle one. With floors they are those
        of codes, with a table those of its values."""
        return _products(self.outer, self.inner) * self.factor

    def minima(self) -> torch.Tensor | None:
        """Return float32 `[n, K / group]`, subtracted from codes times scales; None without."""
        return None if self.floor is None else _products(self.floor, self.floors)

    def values(self) -> torch.Tensor:
        """Return float32 `[n, K]`."""
        wide, scales = self.codes.float(), self.scales()
        if self.table is not None:
            wide = wide.new_tensor(self.table)[self.codes.long()]
        elif self.floor is None:
            wide -= 1 << (self.bits - 1)
        wide = wide.view(len(wide), -1, self.group) * scales[..., None]
        minima = self.minima()
        if minima is not None:
            wide -= minima[..., None]
        return wide.flatten(1)


def _products(outer: torch.Tensor, inner: torch.Tensor | None) -> torch.Tensor:
    wide = outer.float()
    if inner is None:
        return wide
    times = inner.shape[1] // outer.shape[1]
    return wide.repeat_interleave(times, 1) * inner.float()


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 numbers at a byte of all blocks."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def parts(values: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Return the last dimension cut into several."""
    return values.reshape(*values.shape[:-1], *sizes)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return codes `[..., 2 n]` of bytes `[..., n]`: all low halves, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def quarters(packed: torch.Tensor) -> torch.Tensor:
    """Return 256 codes of two bits, `[..., 2, 4, 32]`, of 64 bytes."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
    return parts(packed, 2, 1, 32) >> shifts & 3
