"""Rows of blocks, taken apart into codes with their scales and minima, and the helpers of that."""

from __future__ import annotations

import torch

from vlm_serve.kernels.linear.codes import FLOAT4_VALUES, IntegerCodes, Outer

_KEPT_BITS = {2: 4, 5: 6}
"""Bits of codes of other widths in memory, where they are numbers."""


def taken_apart(
    codes: torch.Tensor,
    bits: int,
    group: int,
    outer: torch.Tensor,
    inner: torch.Tensor | None = None,
    floor: torch.Tensor | None = None,
    floors: torch.Tensor | None = None,
    *,
    table: tuple[int, ...] | None = None,
    factor: float = 1.0,
) -> IntegerCodes:
    """Return rows of blocks as codes.

    Args:
        codes, bits, group, table: as in IntegerCodes; codes may have more dimensions.
        outer: `[n, blocks of a row]`; without `inner` the scales themselves.
        inner: `[n, K / group]`, factors of `outer`.
        floor, floors: like `outer` and `inner`: their product is subtracted.
        factor: of all scales, exact.
    """
    codes, float4 = codes.flatten(1), table is FLOAT4_VALUES
    factors = None if factor == 1 else torch.full((len(codes),), factor)
    bits = _KEPT_BITS.get(bits, bits) if table is None else bits
    levels = None
    if inner is not None:
        levels, outer = Outer(outer, floor, codes.shape[1] // outer.shape[1]), inner.to(torch.int8)
    return IntegerCodes(
        *(codes, outer, None if floors is None else floors.to(torch.uint8), bits, group, factors),
        float4=float4,
        outer=levels,
        table=None if float4 else table,
    )


def finite(codes: IntegerCodes) -> bool:
    """Return True if all scales are numbers."""
    outer = codes.outer
    given = [codes.scales] if outer is None else [outer.scales, outer.floors]
    return all(bool(each.float().isfinite().all()) for each in given if each is not None)


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
