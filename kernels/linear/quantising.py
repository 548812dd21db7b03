"""Quantisation of plain weights: scales by least squares, per row and group of k.

The first scale of a group maps its value of the largest magnitude to the lowest code. Codes follow
from that scale, and the final scale is the best one for those codes. With 4 bits several first
scales are tried, and the one with the least error wins. Scales are kept in bfloat16 beside 8 bits.
Beside fewer they are one byte: the root of the scale over a power of two per row. Steps are finer
where scales are smaller, so groups may differ a hundredfold.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vlm_serve.kernels.linear.codes import IntegerCodes, scale_values

GROUPS = {8: (128, 64, 32, 16), 6: (32, 16), 4: (32, 16)}
"""By bits, candidates for the number of k per scale; the first that divides K is used."""
SCALES = {8: torch.bfloat16, 6: torch.int8, 4: torch.int8}
"""By bits, dtype of the scales; int8: a root, beside a factor per row."""
_BEGINNINGS = {8: (1.0,), 6: (1.0,), 4: (1.0, 0.8, 0.86, 0.92, 0.96, 1.05, 1.12)}
_AT_ONCE = 1 << 20
_MOST_ROOT = 127
_EXPONENTS = (-126, 113)
"""Bounds of factors' exponents: factors, also times the largest root's square, stay normal."""


def group_of(bits: int, depth: int) -> int | None:
    """Return the number of k per scale; None if no group size divides the depth."""
    return next((group for group in GROUPS[bits] if depth % group == 0), None)


def quantise(weight: torch.Tensor, bits: int, group: int) -> IntegerCodes:
    """Quantise a weight to codes around their middle.

    Args:
        weight: `[N, K]`, finite; K is a multiple of `group`.
        bits: 4, 6 or 8.
        group: values per scale.

    Returns:
        Codes without zero points; the scales have the dtype in `SCALES` and may be negative.
    """
    columns, depth = weight.shape
    codes = torch.empty(columns, depth, dtype=torch.uint8)
    scales = torch.empty(columns, depth // group, dtype=SCALES[bits])
    factors = torch.empty(columns) if scales.dtype == torch.int8 else None
    step = max(1, _AT_ONCE // depth)
    for first in range(0, columns, step):
        block = slice(first, first + step)
        plain = weight[block].float().cpu().reshape(-1, depth // group, group)
        best = _best(plain, bits)
        if factors is None:
            scales[block] = best
            kept = scale_values(scales[block], None)
        else:
            scales[block], factors[block] = _roots(best)
            kept = scale_values(scales[block], factors[block])
        middle = 1 << (bits - 1)
        codes[block] = (_whole(plain, kept, bits) + middle).flatten(1).to(torch.uint8)
    return IntegerCodes(codes, scales, None, bits, group, factors)


def quantised(
    pieces: Iterator[torch.Tensor], bits: int, group: int, columns: range
) -> Iterator[IntegerCodes]:
    """Quantise whole rows piece by piece (factors depend on whole rows); yield some columns."""
    for piece in pieces:
        yield quantise(piece, bits, group).of_columns(columns)


def num_bytes(columns: int, depth: int, bits: int, group: int) -> int:
    """Return the size of `[N, K]` codes with their scales and factors."""
    of_scales = depth // group * SCALES[bits].itemsize + (4 if SCALES[bits] == torch.int8 else 0)
    return columns * (depth * bits // 8 + of_scales)


def _best(plain: torch.Tensor, bits: int) -> torch.Tensor:
    """Choose the scales, float32 `[N, groups]`."""
    places = plain.abs().argmax(-1, keepdim=True)
    begin = plain.gather(-1, places).squeeze(-1) / -(1 << (bits - 1))
    best, most = torch.zeros_like(begin), torch.full_like(begin, -1.0)
    for factor in _BEGINNINGS[bits]:
        whole = _whole(plain, begin * factor, bits)
        along, size = (plain * whole).sum(-1), (whole * whole).sum(-1).clamp(min=1e-30)
        # The remaining squared error is the square of the weight less this gain.
        gain = along * along / size
        better = gain > most
        best, most = torch.where(better, along / size, best), torch.where(better, gain, most)
    return best


def _roots(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the roots of scales `[N, groups]` and the factors, float32 `[N]`.

    Factors are the least that the largest scale of a row allows. Only a scale of 0 gets the root 0;
    rounding another one down to 0 would leave a larger error.
    """
    part, exponents = torch.frexp(scale.abs().amax(-1) / _MOST_ROOT**2)
    exponents = (exponents - (part == 0.5).int()).clamp_(*_EXPONENTS)
    # Built from bits: a computed power of two may be off in the last bit.
    factors = ((exponents + 127) << 23).view(torch.float32)
    roots = (scale.abs() / factors[:, None]).sqrt_().round_().clamp_(1, _MOST_ROOT)
    return roots * scale.sign(), factors


def _whole(plain: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """Round to the nearest codes, less their middle; 0 where the scale is."""
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale).clamp(-3e38, 3e38)
    most = 1 << (bits - 1)
    return (plain * inverse[..., None]).round_().clamp_(-most, most - 1)
