"""Order of (token, expert) pairs by expert on a GPU, and its tiles, in one launch.

The grouped products of plain and quantised weights share these tiles.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.triton_support import launch, power_of_two

CHUNK = 1024
"""Pairs that a program looks at together."""
LEAST_BINS = 32


@triton.jit
def tile_pairs(plan, tile, expert, ROWS: tl.constexpr):
    """Find the pairs of a tile of `align`.

    Returns:
        pairs: `[ROWS]`, places in the order sorted by expert.
        real: `[ROWS]`, False past the expert's last pair.
        origin: `[ROWS]`, each pair's place in token order; 0 where not real.
    """
    pairs = tl.load(plan.tile_first + tile) + tl.arange(0, ROWS)
    real = pairs < tl.load(plan.ends + expert)
    return pairs, real, tl.load(plan.order + pairs, mask=real, other=0)


@triton.jit
def store_gated(out, gate, up, pairs, real, columns, WIDTH: tl.constexpr):
    """Store silu(gate) * up in the rows of the pairs, in sorted order."""
    result = gate * tl.sigmoid(gate) * up
    places = pairs.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    mask = real[:, None] & (columns < WIDTH)[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def store_weighted(out, weights, total, pair, real, columns, HIDDEN: tl.constexpr):
    """Store total times the router's weight of each pair, in token order."""
    share = tl.load(weights + pair, mask=real, other=0.0).to(tl.float32)
    total *= share[:, None]
    mask = real[:, None] & (columns < HIDDEN)[None, :]
    places = pair[:, None] * HIDDEN + columns[None, :]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=mask)


class TilePlan(NamedTuple):
    """The order of pairs and its tiles, int32.

    Attributes:
        order: `[T * top_k]`, pairs sorted by expert.
        ends: `[E]`, one past each expert's last.
        tile_expert, tile_first: each tile's expert and its first place in the order.
    """

    order: torch.Tensor
    ends: torch.Tensor
    tile_expert: torch.Tensor
    tile_first: torch.Tensor


@triton.jit
def _fill(place, first, last, value, step, SIZE: tl.constexpr):
    """Store value, value + step, ... in places first..last - 1."""
    for start in range(first, last, SIZE):
        index = start + tl.arange(0, SIZE)
        tl.store(place + index, value + (index - first) * step, mask=index < last)


# The number of pairs differs between steps: specialising on it would recompile while serving.
@triton.jit(do_not_specialize=["pairs", "bound"])
def _align_kernel(
    ids,
    plan,
    pairs,
    bound,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Place the pairs and tiles of one expert, behind those of smaller numbers.

    Every program counts all pairs for itself: no counter is shared, so their order is fixed.
    """
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, pairs, CHUNK):
        index = first + tl.arange(0, CHUNK)
        chosen = tl.load(ids + index, mask=index < pairs, other=EXPERTS).to(tl.int32)
        counts += tl.histogram(chosen, BINS)
    counts = tl.where(bins < EXPERTS, counts, 0)
    tiles = tl.cdiv(counts, ROWS)
    begin = tl.sum(tl.where(bins < expert, counts, 0), axis=0)
    own = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0), axis=0)
    last_tile = first_tile + tl.cdiv(own, ROWS)
    tl.store(plan.ends + expert, begin + own)
    _fill(plan.tile_expert, first_tile, last_tile, expert, 0, BINS)
    _fill(plan.tile_first, first_tile, last_tile, begin, ROWS, BINS)
    if expert == EXPERTS - 1:
        _fill(plan.tile_expert, last_tile, bound, -1, 0, BINS)
    if own > 0:
        for first in range(0, pairs, CHUNK):
            index = first + tl.arange(0, CHUNK)
            chosen = tl.load(ids + index, mask=index < pairs, other=EXPERTS).to(tl.int32)
            here = (chosen == expert).to(tl.int32)
            places = begin + tl.cumsum(here, axis=0) - 1
            tl.store(plan.order + places, index, mask=here > 0)
            begin += tl.sum(here, axis=0)


def align(ids: torch.Tensor, experts: int, rows: int) -> TilePlan:
    """Sort pairs by expert, stably, and cut them into tiles of one expert each.

    Nothing is read from the device: the number of tiles is an upper bound, and unused ones name
    expert -1.

    Args:
        ids: int64 `[T, top_k]`, experts of each token.
        rows: pairs of a tile.
    """
    pairs = ids.numel()
    bound = triton.cdiv(pairs, rows) + min(experts, pairs)
    sizes = pairs, experts, bound, bound
    plan = TilePlan._make(torch.empty(size, dtype=torch.int32, device=ids.device) for size in sizes)
    arguments = {
        "ids": ids.contiguous(),
        "plan": plan,
        "pairs": pairs,
        "bound": bound,
        "EXPERTS": experts,
        "BINS": power_of_two(experts + 1, LEAST_BINS),
        "ROWS": rows,
        "CHUNK": CHUNK,
    }
    launch(_align_kernel, (experts,), arguments)
    return plan
