"""Attention of packed segments by torch, segment by segment."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def segment_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend; rows of no segment are 0."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for begin, end in dict.fromkeys((begin, end) for begin, end, _ in tiles.tolist()):
        if begin < end:
            queries, keys, values = (
                tensor[None, begin:end].transpose(1, 2) for tensor in (q, k, v)
            )
            mixed = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
            out[begin:end] = mixed[0].transpose(0, 1)
    return out
