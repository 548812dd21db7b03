"""Blocks of GGUF files as codes with their scales and minima, and as numbers.

A block of 32 values begins with its scale. A block of 256 has two levels: a float16 scale d, and a
whole number sc for each group. A value is `(d sc) q`, with a q around zero (Q6_K, Q3_K, IQ4_XS), or
`(d sc) q - (dmin m)` (Q4_K, Q5_K, Q2_K). Both products are exact in float32, and so is the one with
q: only the subtraction rounds. Q4_1 and Q5_1 have minima for each 32 values, without an m.

Four-bit codes lie in bytes by halves: low bits are the values of the first half, high bits those of
the second.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vlm_serve.kernels.linear.codes import FLOAT4_VALUES, IQ4_VALUES, IntegerCodes
from vlm_serve.models.gguf.decoded import half, nibbles, parts, quarters, taken_apart
from vlm_serve.models.gguf.few_bits import FEW_BITS
from vlm_serve.models.gguf.reader import BlockType

_E8M0 = torch.float8_e8m0fnu


def decode(kind: BlockType, rows: torch.Tensor) -> IntegerCodes:
    """Take apart uint8 `[n, bytes of a row]`."""
    return _DECODERS[kind.name](rows.reshape(len(rows), -1, kind.nbytes))


def _q8_0(blocks: torch.Tensor) -> IntegerCodes:
    return taken_apart(blocks[..., 2:] ^ 128, 8, 32, half(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> IntegerCodes:
    return taken_apart(nibbles(blocks[..., 2:]), 4, 32, half(blocks, 0))


def _mxfp4(blocks: torch.Tensor) -> IntegerCodes:
    exponents = blocks[..., 0].contiguous().view(_E8M0)
    codes = nibbles(blocks[..., 1:])
    return taken_apart(codes, 4, 32, exponents, table=FLOAT4_VALUES, factor=0.5)


def _scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int16 `[n, 8 blocks]` factors of scales and of minima from 12 bytes of a block.

    The first four of each have six bits of a byte. The last four have their low bits in the last
    four bytes, and their high ones above those of the first four.
    """
    first, second, last = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, (last & 15) | (first >> 6) << 4], -1)
    minima = torch.cat([second & 63, (last >> 4) | (second >> 6) << 4], -1)
    return scales.flatten(1).short(), minima.flatten(1).short()


def _q4_k(blocks: torch.Tensor) -> IntegerCodes:
    scales, minima = _scales_and_minima(blocks[..., 4:16])
    codes = nibbles(parts(blocks[..., 16:], 4, 32))
    return taken_apart(codes, 4, 32, half(blocks, 0), scales, half(blocks, 2), minima)


def _q5_k(blocks: torch.Tensor) -> IntegerCodes:
    scales, minima = _scales_and_minima(blocks[..., 4:16])
    low = parts(nibbles(parts(blocks[..., 48:], 4, 32)), 2, 32)
    shifts = torch.arange(8, dtype=torch.uint8).view(4, 2, 1)
    high = (blocks[..., None, None, 16:48] >> shifts & 1) << 4
    return taken_apart(low | high, 5, 32, half(blocks, 0), scales, half(blocks, 2), minima)


def _q6_k(blocks: torch.Tensor) -> IntegerCodes:
    low = parts(nibbles(parts(blocks[..., :128], 2, 64)), 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
    high = (parts(blocks[..., 128:192], 2, 1, 32) >> shifts & 3) << 4
    inner = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1).short()
    return taken_apart(low | high, 6, 16, half(blocks, 208), inner)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return 0 or 16 for 32 codes of a block, from the bits of four bytes."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed[..., None] >> shifts & 1) << 4).flatten(-2)


def _q5_0(blocks: torch.Tensor) -> IntegerCodes:
    codes = nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return taken_apart(codes + 16, 6, 32, half(blocks, 0))


def _with_floor(codes: torch.Tensor, bits: int, blocks: torch.Tensor) -> IntegerCodes:
    """Return codes with the scale and the negative minimum that blocks of 32 begin with."""
    ones = torch.ones(blocks.shape[:2], dtype=torch.int16)
    return taken_apart(codes, bits, 32, half(blocks, 0), ones, -half(blocks, 2), ones)


def _q4_1(blocks: torch.Tensor) -> IntegerCodes:
    return _with_floor(nibbles(blocks[..., 4:]), 4, blocks)


def _q5_1(blocks: torch.Tensor) -> IntegerCodes:
    codes = nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _with_floor(codes, 5, blocks)


def _q2_k(blocks: torch.Tensor) -> IntegerCodes:
    factors = blocks[..., :16].flatten(1)
    scales, minima = (factors & 15).short(), (factors >> 4).short()
    codes = quarters(blocks[..., 16:80])
    return taken_apart(codes, 2, 16, half(blocks, 80), scales, half(blocks, 82), minima)


def _q3_k(blocks: torch.Tensor) -> IntegerCodes:
    places = torch.arange(8, dtype=torch.uint8).view(2, 4, 1)
    high = parts(blocks[..., :32], 1, 1, 32) >> places & 1
    codes = (quarters(blocks[..., 32:96]) | high << 2) + 4
    low = nibbles(blocks[..., 96:104])
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
    tops = (parts(blocks[..., 104:108], 1, 4) >> shifts & 3).flatten(-2)
    inner = (low | tops << 4).short() - 32
    return taken_apart(codes, 4, 16, half(blocks, 108), inner.flatten(1))


def _iq4_nl(blocks: torch.Tensor) -> IntegerCodes:
    codes = nibbles(blocks[..., 2:])
    return taken_apart(codes, 4, 32, half(blocks, 0), table=IQ4_VALUES)


def _iq4_xs(blocks: torch.Tensor) -> IntegerCodes:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    tops = (blocks[..., 2:4, None] >> shifts & 3).flatten(-2)
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    inner = (low | tops << 4).short() - 32
    codes = nibbles(parts(blocks[..., 8:], 8, 16))
    return taken_apart(codes, 4, 32, half(blocks, 0), inner.flatten(1), table=IQ4_VALUES)


def _nvfp4(blocks: torch.Tensor) -> IntegerCodes:
    """Read scales as e4m3 numbers without a sign: the largest code is 0, a signed one no number."""
    stored = blocks[..., :4]
    kept = torch.where(stored < 127, stored, (stored > 127).to(torch.uint8) * 127)
    scales = kept.flatten(1).view(torch.float8_e4m3fn)
    codes = nibbles(parts(blocks[..., 4:], 4, 8))
    return taken_apart(codes, 4, 16, scales, table=FLOAT4_VALUES, factor=0.5)


_DECODERS: dict[str, Callable[[torch.Tensor], IntegerCodes]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    **FEW_BITS,
}
