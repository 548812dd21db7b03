"""Writing keys and values into pages by torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlm_serve.kernels.kv_quant import quantise, to_float8
from vlm_serve.kernels.metadata import KVLayer


def write_kv(k: torch.Tensor, v: torch.Tensor, kv: KVLayer, slots: torch.Tensor) -> None:
    wanted = slots >= 0
    if not bool(wanted.all()):
        k, v, slots = k[wanted], v[wanted], slots[wanted]
    size = kv.k.shape[1]
    index = (slots // size, slots % size)
    for x, (pages, scales, zeros) in zip((k, v), kv.halves, strict=True):
        if scales is not None and zeros is not None:
            codes, scale, zero = quantise(x)
            pages[index], scales[index], zeros[index] = codes, scale, zero
        elif pages.dtype == torch.float8_e4m3fn:
            pages.view(torch.uint8)[index] = to_float8(x).view(torch.uint8)
        else:
            pages[index] = x.to(pages.dtype)


def copy_kv_rows(
    kv_pool: torch.Tensor,
    scales: torch.Tensor | None,
    copies: Sequence[tuple[int, int, int]],
) -> None:
    for src, dst, rows in copies:
        kv_pool[dst, :, :, :rows].copy_(kv_pool[src, :, :, :rows])
        if scales is not None:
            scales[dst, :, :, :rows].copy_(scales[src, :, :, :rows])
