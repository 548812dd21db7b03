"""Attention of packed segments, each to itself: pictures and frames in a vision tower.

Their bounds lie in a table on the device, so a captured run serves segments of any lengths. Tiles
of queries and of keys begin where their segment begins: a row's bits depend on its segment alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlm_serve.kernels.checks import FLOAT_DTYPES, KernelArgumentError, check_tensor
from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.segment_attention import reference

ROWS = 64
"""Queries of a tile."""
_attend = Op(
    reference.segment_attention,
    triton="vlm_serve.kernels.segment_attention.triton:segment_attention",
)


def segment_tiles(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (begin, end, first query) for each tile of packed segments, in their order."""
    tiles, begin = list[tuple[int, int, int]](), 0
    for length in lengths:
        end = begin + length
        tiles += [(begin, end, first) for first in range(begin, end, ROWS)]
        begin = end
    return tiles


def segment_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Attend from every row of a segment to all rows of this segment.

    Args:
        q, k, v: `[N, heads, D]`, float32, bfloat16 or float16, each row dense.
        tiles: int32 `[tiles, 3]`, see `segment_tiles`; one with `begin == end` does nothing.
        scale: factor of the scores, positive.

    Returns:
        `[N, heads, D]`, contiguous; rows of no segment are undefined.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    rows, heads, dim = q.shape
    check_tensor("q", q, (rows, heads, dim), FLOAT_DTYPES, q.device)
    check_tensor("k", k, (rows, heads, dim), (q.dtype,), q.device)
    check_tensor("v", v, (rows, heads, dim), (q.dtype,), q.device)
    check_tensor("tiles", tiles, (None, 3), (torch.int32,), q.device)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(1) != dim:
            raise KernelArgumentError(name, "expected the heads of a row side by side")
    if not tiles.is_contiguous():
        raise KernelArgumentError("tiles", "expected a contiguous tensor")
    return _attend(q.device, q, k, v, tiles, scale)
