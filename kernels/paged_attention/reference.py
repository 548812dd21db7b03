"""Reference attention over paged keys and values, the oracle of tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlm_serve.kernels.kv_quant import dequantise
from vlm_serve.kernels.metadata import KVLayer


def attention_reference(
    q: torch.Tensor, kv: KVLayer, table: Sequence[int], start: int, scale: float
) -> torch.Tensor:
    """Attend in one sequence, query by query and head by head, in float64; the oracle of tests.

    Args:
        q: `[n, Hq, D]`, the queries at positions start, start + 1, ...
        kv: the layer's pages.
        table: block ids of the sequence.
        start: absolute position of the first query.
        scale: factor on the scores.

    Returns:
        `[n, Hq, D]` float64.
    """
    size, shared = kv.k.shape[1], q.shape[1] // kv.k.shape[2]
    places = [(table[p // size], p % size) for p in range(start + q.shape[0])]
    keys = torch.stack([_stored(kv.k, kv.k_scale, kv.k_zero, place) for place in places])
    values = torch.stack([_stored(kv.v, kv.v_scale, kv.v_zero, place) for place in places])
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(q.shape[0]):
        for head in range(q.shape[1]):
            visible = slice(0, start + i + 1)
            scores = keys[visible, head // shared] @ q[i, head].double() * scale
            out[i, head] = torch.softmax(scores, 0) @ values[visible, head // shared]
    return out


def _stored(
    pages: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    place: tuple[int, int],
) -> torch.Tensor:
    if scale is None or zero is None:
        return pages[place].double()
    return dequantise(pages[place], scale[place], zero[place], torch.float64)
