"""Attention of packed segments on a GPU: a program for each tile of queries and head."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.segment_attention import ROWS
from vlm_serve.kernels.triton_support import current_target, dot_dtype, launch, power_of_two


@triton.jit
def _segment_kernel(
    q,
    k,
    v,
    out,
    tiles,
    q_row_stride,
    k_row_stride,
    v_row_stride,
    score_scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend from a tile of queries to the keys of their segment, with an online softmax.

    Keys are counted from the segment's first one. Rows outside of the segment may hold anything,
    NaN included: they are neither read nor written.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(tiles + tile * 3)
    end = tl.load(tiles + tile * 3 + 1)
    rows = tl.load(tiles + tile * 3 + 2) + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    inside = (rows < end)[:, None] & (dims < DIM)[None, :]
    own = rows.to(tl.int64)[:, None]
    places = own * q_row_stride + head * DIM + dims[None, :]
    queries = tl.load(q + places, mask=inside, other=0.0).to(DOT)
    k += head * DIM
    v += head * DIM
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    norm = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, BLOCK_DIM), tl.float32)
    offsets = tl.arange(0, KEYS)
    for start in range(begin, end, KEYS):
        keys_at = start + offsets
        known = keys_at < end
        read = known[:, None] & (dims < DIM)[None, :]
        at = keys_at.to(tl.int64)[:, None]
        keys = tl.load(k + at * k_row_stride + dims[None, :], mask=read, other=0.0).to(DOT)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores = tl.where(known[None, :], scores, float("-inf"))
        larger = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2((best - larger) * score_scale)
        weights = tl.exp2((scores - larger[:, None]) * score_scale)
        norm = norm * shrink + tl.sum(weights, axis=1)
        total = total * shrink[:, None]
        best = larger
        values = tl.load(v + at * v_row_stride + dims[None, :], mask=read, other=0.0).to(DOT)
        total = tl.dot(weights.to(DOT), values, total, input_precision=PRECISION)
    result = total / norm[:, None]
    places = (own * HEADS + head) * DIM + dims[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)


def segment_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend in tiles that follow from dtype, head dim and target alone."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    heads, dim = q.shape[1:]
    target, wide = current_target(), q.dtype == torch.float32
    # Parts of split operands take registers beside the running output.
    keys = (32 if dim <= 64 else 16) if wide else 64
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "tiles": tiles,
        "q_row_stride": q.stride(0),
        "k_row_stride": k.stride(0),
        "v_row_stride": v.stride(0),
        "score_scale": scale * math.log2(math.e),
        "HEADS": heads,
        "DIM": dim,
        "BLOCK_DIM": power_of_two(dim, 16),
        "ROWS": ROWS,
        "KEYS": keys,
        "DOT": dot_dtype(q.dtype),
        "PRECISION": target.dot_precision,
    }
    stages = 1 if wide or target.backend == "hip" else 3
    launch(
        _segment_kernel,
        (len(tiles), heads),
        arguments,
        num_warps=8 if wide else 4,
        num_stages=stages,
    )
    return out
