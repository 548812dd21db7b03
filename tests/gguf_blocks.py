"""Encodes weights in llama.cpp's blocks, plainly: `gguf` itself has no encoder of blocks of 256."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

Array = npt.NDArray[Any]
PLAIN = {Kind.F32: np.float32, Kind.F16: np.float16}


HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
    "NVFP4": (),
    "IQ1_S": (0,),
    "IQ1_M": (),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Where blocks have float16 numbers."""


def random_blocks(name: str, rows: int, width: int, seed: int = 0) -> Array:
    """Bytes of rows of so many values, all of them numbers."""
    values, nbytes = gguf.GGML_QUANT_SIZES[Kind[name]]
    dice = np.random.default_rng(seed)
    blocks = dice.integers(0, 256, (rows, width // values, nbytes), dtype=np.uint8)
    for at in HALVES[name]:
        numbers = dice.normal(size=(*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., at : at + 2] = numbers.view(np.uint8)
    if name == "IQ1_M":
        put_scales(blocks, dice.normal(size=blocks.shape[:2]).astype(np.float16))
    if name == "MXFP4":
        blocks[..., 0] = 120 + blocks[..., 0] % 16
    if name == "NVFP4":
        blocks[..., :4] &= 127
    return blocks.reshape(rows, -1)


def put_scales(blocks: Array, scales: Array) -> None:
    """Set the scales of IQ1_M, whose bits are the top ones of four words."""
    bits = scales.view(np.uint16)
    for word in range(4):
        place = blocks[..., 49 + 2 * word]
        place[...] = (place & 15) | (bits >> 4 * word & 15).astype(np.uint8) << 4


def encode(values: Array, kind: Kind) -> Array:
    """Rows of values as numbers or, in bytes, as blocks; of a type without an encoder, as random
    blocks with values of the same size."""
    if kind in PLAIN:
        return np.ascontiguousarray(values, PLAIN[kind])
    if kind in _ENCODERS:
        rows = values.reshape(-1, values.shape[-1] // 256, 256)
        blocks = np.concatenate(_ENCODERS[kind](rows), -1)
        return blocks.reshape(*values.shape[:-1], -1)
    if kind.name in _WITHOUT:
        return _random_like(values, kind)
    found: Array = gguf.quants.quantize(values, kind)
    return found


_WITHOUT = ("Q2_K", "Q3_K", "NVFP4", *(name for name in HALVES if name.startswith("IQ")))


def _random_like(values: Array, kind: Kind) -> Array:
    rows = int(np.prod(values.shape[:-1]))
    stored = random_blocks(kind.name, rows, values.shape[-1])
    ratio = values.std() / decode(stored, kind).std()
    blocks = stored.reshape(rows, -1, gguf.GGML_QUANT_SIZES[kind][1])
    for at in HALVES[kind.name]:
        scales = np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16) * ratio
        blocks[..., at : at + 2] = scales.astype(np.float16).view(np.uint8)
    if kind.name == "NVFP4":  # Scales from 1/32 on.
        blocks[..., :4] = 16 + blocks[..., :4] % 8
    if kind.name == "IQ1_M":
        put_scales(blocks, np.full(blocks.shape[:2], ratio, np.float16))
    return blocks.reshape(*values.shape[:-1], -1)


def decode(stored: Array, kind: Kind) -> Array:
    """The values that such rows stand for, by `gguf`."""
    found: Array = gguf.quants.dequantize(stored, kind)
    return found


def _bytes(halves: Array) -> Array:
    return np.ascontiguousarray(halves[..., None], np.float16).view(np.uint8)


def _with_minima(rows: Array, most: int) -> tuple[Array, list[Array]]:
    """Codes up to `most` in groups of 32, and the first 16 bytes of their blocks."""
    groups = rows.reshape(*rows.shape[:2], 8, 32)
    low = np.minimum(groups.min(-1), 0)
    scale = (groups.max(-1) - low) / most
    outer = (scale.max(-1) / 63).astype(np.float16), (-low.min(-1) / 63).astype(np.float16)
    scales, minima = (
        np.round(each / np.maximum(top.astype(np.float32), 1e-12)[..., None]).astype(np.uint8) & 63
        for each, top in zip((scale, -low), outer, strict=True)
    )
    step = outer[0].astype(np.float32)[..., None] * scales
    floor = outer[1].astype(np.float32)[..., None] * minima
    codes = np.round((groups + floor[..., None]) / np.maximum(step, 1e-12)[..., None])
    first = scales[..., :4] | (scales[..., 4:] >> 4 << 6)
    second = minima[..., :4] | (minima[..., 4:] >> 4 << 6)
    last = (scales[..., 4:] & 15) | (minima[..., 4:] & 15) << 4
    head = [*map(_bytes, outer), first, second, last]
    return codes.clip(0, most).astype(np.uint8), head


def _nibbles(codes: Array) -> Array:
    """Bytes of codes `[..., 64]`: the second half in the high bits."""
    own = codes.astype(np.uint8) & 15
    return np.asarray(own[..., :32] | own[..., 32:] << 4).reshape(*codes.shape[:2], -1)


def _q4_k(rows: Array) -> list[Array]:
    codes, head = _with_minima(rows, 15)
    return [*head, _nibbles(codes.reshape(*rows.shape[:2], 4, 64))]


def _q5_k(rows: Array) -> list[Array]:
    codes, head = _with_minima(rows, 31)
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce((codes >> 4) << shifts, -2)
    return [*head, high, _nibbles(codes.reshape(*rows.shape[:2], 4, 64))]


def _q6_k(rows: Array) -> list[Array]:
    groups = rows.reshape(*rows.shape[:2], 16, 16)
    most = groups.max(-1) + groups.min(-1)
    scale = np.where(most > 0, 1, -1) * np.abs(groups).max(-1) / 32
    outer = (np.abs(scale).max(-1) / 127).astype(np.float16)
    inner = np.round(scale / np.maximum(outer.astype(np.float32), 1e-12)[..., None]).astype(np.int8)
    step = outer.astype(np.float32)[..., None] * inner
    codes = np.round(groups / np.where(step == 0, 1, step)[..., None]).clip(-32, 31) + 32
    quarters = codes.astype(np.uint8).reshape(*rows.shape[:2], 2, 4, 32)
    low = (quarters[..., :2, :] & 15) | (quarters[..., 2:, :] & 15) << 4
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce((quarters >> 4) << shifts, -2)
    flat = [each.reshape(*rows.shape[:2], -1) for each in (low, high)]
    return [*flat, inner.view(np.uint8), _bytes(outer)]


_ENCODERS = {Kind.Q4_K: _q4_k, Kind.Q5_K: _q5_k, Kind.Q6_K: _q6_k}
