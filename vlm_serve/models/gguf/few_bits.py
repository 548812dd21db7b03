"""Blocks of one to three bits a value: IQ1 to IQ3, TQ1_0 and TQ2_0.

A block of IQ holds places in a grid: the magnitudes of eight or four neighbours at once, with their
signs beside them. Here a code is the place of a magnitude in the grid's short list, and its top bit
the sign. A scale is `d (2 s + 1)` times a power of two. In IQ1 an eighth of it is added to every
value of a group, or subtracted: values are whole numbers of eighths.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from vlm_serve.kernels.linear.codes import IntegerCodes
from vlm_serve.models.gguf.decoded import half, parts, quarters, taken_apart

_GRIDS = Path(__file__).with_name("grids.txt")
"""Of each grid its name, the values of a place, and zlib's base85 of their codes: four a byte, or
two of IQ3; the lowest bits first."""


def _signed(magnitudes: tuple[int, ...]) -> tuple[int, ...]:
    return *magnitudes, *(-value for value in magnitudes)


_IQ2 = _signed((8, 25, 43, 0))
_IQ3_XXS = _signed((4, 12, 20, 28, 36, 44, 52, 62))
_IQ3_S = _signed((1, 3, 5, 7, 9, 11, 13, 15))
_IQ1_S = (-7, 1, 9)
_IQ1_M = (-7, 1, 9, 0, -9, -1, 7, 0)
_TERNARY = (-1, 0, 1, 2)


@cache
def _grid(name: str) -> torch.Tensor:
    """Return the codes of all places, uint8 `[places, values]`."""
    words = _GRIDS.read_text(encoding="ascii").split()
    width, packed = int(words[words.index(name) + 1]), words[words.index(name) + 2]
    raw = torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(packed))), dtype=torch.uint8)
    step = 2 if width == 8 else 4
    shifts = torch.arange(0, 8, step, dtype=torch.uint8)
    return (raw[:, None] >> shifts & ((1 << step) - 1)).view(-1, width)


@cache
def _even_signs() -> torch.Tensor:
    """Return the eight signs of every seven bits, uint8 `[128]`: an even number is negative."""
    bits = torch.arange(128)
    odd = (bits[:, None] >> torch.arange(7) & 1).sum(1) & 1
    return (bits | odd << 7).to(torch.uint8)


def _fields(words: torch.Tensor, step: int, mask: int = 1, count: int = 8) -> torch.Tensor:
    """Return fields of words, `[..., count]`, the lowest bits first."""
    return words[..., None].long() >> torch.arange(0, count * step, step) & mask


def _words(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the unsigned words of bytes, int64 `[..., n]`."""
    mask = (1 << 8 * dtype.itemsize) - 1
    return stored.clone(memory_format=torch.contiguous_format).view(dtype).long() & mask


def _factors(scales: torch.Tensor) -> torch.Tensor:
    return (2 * scales.short() + 1).flatten(1)


def _of_grid(
    name: str, places: torch.Tensor, signs: torch.Tensor, table: tuple[int, ...]
) -> torch.Tensor:
    """Return codes, uint8 `[n, K]`, of places and of a byte of signs for eight values. The second
    half of a table has the other sign."""
    codes = _grid(name)[places.long()].flatten(1)
    return codes | (_fields(signs, 1).flatten(1) * (len(table) // 2)).byte()


def _pairs(stored: torch.Tensor) -> torch.Tensor:
    """Return the half bytes of bytes, neighbours together."""
    return torch.stack([stored & 15, stored >> 4], -1).flatten(-2)


def _iq2_xxs(blocks: torch.Tensor) -> IntegerCodes:
    groups = parts(blocks[..., 2:], 8, 8)
    words = _words(groups[..., 4:], torch.int32).squeeze(-1)
    signs = _even_signs()[_fields(words, 7, 127, 4)]
    codes = _of_grid("IQ2_XXS", groups[..., :4], signs, _IQ2)
    scales = _factors(words >> 28)
    return taken_apart(codes, 3, 32, half(blocks, 0), scales, table=_IQ2, factor=1 / 8)


def _iq2_xs(blocks: torch.Tensor) -> IntegerCodes:
    words = _words(blocks[..., 2:66], torch.int16)
    codes = _of_grid("IQ2_XS", words & 511, _even_signs()[words >> 9], _IQ2)
    scales = _factors(_pairs(blocks[..., 66:]))
    return taken_apart(codes, 3, 16, half(blocks, 0), scales, table=_IQ2, factor=1 / 8)


def _iq2_s(blocks: torch.Tensor) -> IntegerCodes:
    top = _fields(blocks[..., 66:74], 2, 3, 4).flatten(-2) << 8
    codes = _of_grid("IQ2_S", blocks[..., 2:34] | top, blocks[..., 34:66], _IQ2)
    scales = _factors(_pairs(blocks[..., 74:]))
    return taken_apart(codes, 3, 16, half(blocks, 0), scales, table=_IQ2, factor=1 / 8)


def _iq3_xxs(blocks: torch.Tensor) -> IntegerCodes:
    words = _words(blocks[..., 66:], torch.int32)
    signs = _even_signs()[_fields(words, 7, 127, 4)]
    codes = _of_grid("IQ3_XXS", blocks[..., 2:66], signs, _IQ3_XXS)
    scales = _factors(words >> 28)
    return taken_apart(codes, 4, 32, half(blocks, 0), scales, table=_IQ3_XXS, factor=1 / 4)


def _iq3_s(blocks: torch.Tensor) -> IntegerCodes:
    top = _fields(blocks[..., 66:74], 1).flatten(-2) << 8
    codes = _of_grid("IQ3_S", blocks[..., 2:66] | top, blocks[..., 74:106], _IQ3_S)
    scales = _factors(_pairs(blocks[..., 106:]))
    return taken_apart(codes, 4, 32, half(blocks, 0), scales, table=_IQ3_S)


def _iq1_s(blocks: torch.Tensor) -> IntegerCodes:
    """Negate scale and values where the eighth is subtracted."""
    words = _words(blocks[..., 34:], torch.int16)
    places = blocks[..., 2:34] | _fields(words, 3, 7, 4).flatten(-2) << 8
    codes = _grid("IQ1")[places].view(len(blocks), -1, 32)
    negated = (words >> 15).flatten(1)
    codes = torch.where(negated[..., None] > 0, 2 - codes, codes).flatten(1)
    scales = _factors(words >> 12 & 7) * (1 - 2 * negated).short()
    return taken_apart(codes, 2, 32, half(blocks, 0), scales, table=_IQ1_S, factor=1 / 8)


def _iq1_m(blocks: torch.Tensor) -> IntegerCodes:
    """Put the block's scale together from the top bits of four words."""
    words, tops = _words(blocks[..., 48:], torch.int16), _pairs(blocks[..., 32:48]).long()
    outer = (words >> 12 << torch.arange(0, 16, 4)).sum(-1)
    outer = (outer - (outer >> 15 << 16)).short().view(torch.float16)
    codes = _grid("IQ1")[blocks[..., :32] | (tops & 7) << 8] | ((tops >> 3) * 4).byte()[..., None]
    scales = _factors(_fields(words, 3, 7, 4))
    return taken_apart(codes.flatten(1), 3, 16, outer, scales, table=_IQ1_M, factor=1 / 8)


def _thirds(stored: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first digits of bytes that are fractions in base 3, uint8 `[..., count * n]`."""
    powers = 3 ** torch.arange(count, dtype=torch.int32).view(-1, 1)
    return ((stored.int()[..., None, :] * powers & 255) * 3 >> 8).byte().flatten(-2)


def _tq1_0(blocks: torch.Tensor) -> IntegerCodes:
    first, second, last = blocks[..., :32], blocks[..., 32:48], blocks[..., 48:52]
    codes = torch.cat([_thirds(first, 5), _thirds(second, 5), _thirds(last, 4)], -1)
    return taken_apart(codes.flatten(1), 2, 256, half(blocks, 52), table=_TERNARY)


def _tq2_0(blocks: torch.Tensor) -> IntegerCodes:
    return taken_apart(quarters(blocks[..., :64]), 2, 256, half(blocks, 64), table=_TERNARY)


FEW_BITS: dict[str, Callable[[torch.Tensor], IntegerCodes]] = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}
