"""Plain weights as codes: scales by least squares, per row and group of k.

A group's scale begins where its value of the largest magnitude is the lowest code, and is then the
one that is best for its codes: of the codes of several beginnings those that leave the least error.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vlm_serve.kernels.linear.codes import IntegerCodes

GROUPS = {8: (128, 64, 32, 16), 4: (32, 16)}
"""By bits, how many k share a scale: the first that divides K."""
SCALES = torch.bfloat16
_BEGINNINGS = {8: (1.0,), 4: (1.0, 0.8, 0.86, 0.92, 0.96, 1.05, 1.12)}
_AT_ONCE = 1 << 20


def group_of(bits: int, depth: int) -> int | None:
    """How many k would share a scale; None if rows do not consist of whole groups."""
    return next((group for group in GROUPS[bits] if depth % group == 0), None)


def quantise(weight: torch.Tensor, bits: int, group: int) -> IntegerCodes:
    """A weight as codes around their middle.

    Args:
        weight: `[N, K]`, finite; K is a multiple of `group`.
        bits: 4 or 8.
        group: values of one scale.

    Returns:
        Codes without zero points, with scales in bfloat16, which may be negative.
    """
    columns, depth = weight.shape
    codes = torch.empty(columns, depth, dtype=torch.uint8)
    scales = torch.empty(columns, depth // group, dtype=SCALES)
    step = max(1, _AT_ONCE // depth)
    for first in range(0, columns, step):
        own = slice(first, first + step)
        plain = weight[own].float().cpu().reshape(-1, depth // group, group)
        scale = _best(plain, bits).to(SCALES)
        scales[own] = scale
        middle = 1 << (bits - 1)
        codes[own] = (_whole(plain, scale.float(), bits) + middle).flatten(1).to(torch.uint8)
    return IntegerCodes(codes, scales, None, bits, group)


def quantised(pieces: Iterator[torch.Tensor], bits: int, group: int) -> Iterator[IntegerCodes]:
    """The same, piece by piece."""
    for piece in pieces:
        yield quantise(piece, bits, group)


def _best(plain: torch.Tensor, bits: int) -> torch.Tensor:
    """float32 `[N, groups]`."""
    places = plain.abs().argmax(-1, keepdim=True)
    begin = plain.gather(-1, places).squeeze(-1) / -(1 << (bits - 1))
    best, most = torch.zeros_like(begin), torch.full_like(begin, -1.0)
    for factor in _BEGINNINGS[bits]:
        whole = _whole(plain, begin * factor, bits)
        along, size = (plain * whole).sum(-1), (whole * whole).sum(-1).clamp(min=1e-30)
        # What the codes leave is the square of the weight less this.
        gain = along * along / size
        better = gain > most
        best, most = torch.where(better, along / size, best), torch.where(better, gain, most)
    return best


def _whole(plain: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest codes less the middle; 0 where the scale is."""
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale).clamp(-3e38, 3e38)
    most = 1 << (bits - 1)
    return (plain * inverse[..., None]).round_().clamp_(-most, most - 1)
