"""Stored forms of keys and values: the contents of pages and how to read them back.

int8 pages hold unsigned codes with a float16 scale and zero point per token and head:
`value = scale * (code - zero)`. The range always includes 0, so that the zero point is a code
(0..255, exact in float16). The scale is rounded up to float16, so that the range still fits 256
codes.
"""

from __future__ import annotations

import torch

FLOAT8_MAX = 448.0


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise `[..., D]` floats to uint8 codes `[..., D]`, float16 scale and zero point
    `[...]`."""
    wide = x.float()
    low = wide.amin(-1).clamp_max_(0.0)
    spread = wide.amax(-1).clamp_min_(0.0) - low
    scale = round_up_half(spread / 255.0)
    inverse = torch.where(scale > 0, 1.0 / scale.float(), 0.0)
    zero = (-low * inverse).round_()
    codes = (wide * inverse.unsqueeze(-1)).round_().add_(zero.unsqueeze(-1)).clamp_(0.0, 255.0)
    return codes.to(torch.uint8), scale, zero.half()


def dequantise(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Invert `quantise`: compute in float32 and return `dtype`."""
    wide = codes.float().sub_(zero.float().unsqueeze(-1)).mul_(scale.float().unsqueeze(-1))
    return wide.to(dtype)


def pick(
    pages: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    blocks: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Copy some blocks from their stored form to `[n, block_size, Hkv, D]` in `dtype`."""
    if scale is not None and zero is not None:
        codes, scale, zero = (stored.index_select(0, blocks) for stored in (pages, scale, zero))
        return dequantise(codes, scale, zero, dtype)
    if pages.dtype == torch.float8_e4m3fn:
        codes = pages.view(torch.uint8).index_select(0, blocks)
        return codes.view(pages.dtype).to(dtype)
    return pages.index_select(0, blocks).to(dtype)


def to_float8(x: torch.Tensor) -> torch.Tensor:
    """Convert to float8_e4m3fn with saturation; the plain cast turns values past 448 into NaN."""
    return x.float().clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)


def round_up_half(x: torch.Tensor) -> torch.Tensor:
    """Return the smallest float16 not below x, for 0 <= x <= 65504."""
    half = x.half()
    above = (half.view(torch.int16) + 1).view(torch.float16)
    return torch.where(half.float() < x, above, half)
