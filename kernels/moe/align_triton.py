"""Order of (token, expert) pairs by expert on a GPU, and its tiles.

Few pairs take one launch. Many take two, of which a program counts and places a part.

The grouped products of plain and quantised weights share the tiles.
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
FEW = 1024
"""Most pairs that one launch sorts. Each of its programs looks at all pairs twice."""
PART = 256
"""Pairs that a program of the two launches counts, and places."""
STEP = 16
"""Pairs and tiles that such a program places at a time."""


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
def store_inner(out, result, pairs, real, columns, WIDTH: tl.constexpr):
    """Store what is between an expert's products in the rows of the pairs, in sorted order."""
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


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(
    ids, counts, pairs, EXPERTS: tl.constexpr, BINS: tl.constexpr, PART: tl.constexpr
):
    """Count the pairs of each expert in a part."""
    part = tl.program_id(0)
    index = part * PART + tl.arange(0, PART)
    chosen = tl.load(ids + index, mask=index < pairs, other=EXPERTS).to(tl.int32)
    tl.store(counts + part * BINS + tl.arange(0, BINS), tl.histogram(chosen, BINS))


@triton.jit(do_not_specialize=["pairs", "bound"])
def _place_kernel(
    ids,
    plan,
    counts,
    pairs,
    bound,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    STEP: tl.constexpr,
):
    """Place the pairs of a part, behind those of smaller experts and of parts before it, and some
    tiles."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    bins, step = tl.arange(0, BINS), tl.arange(0, STEP)
    total, before = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)
    for first in range(0, parts, STEP):
        number = first + step
        known = (number < parts)[:, None] & (bins < EXPERTS)[None, :]
        own = tl.load(counts + number[:, None] * BINS + bins[None, :], mask=known, other=0)
        total += tl.sum(own, axis=0)
        before += tl.sum(tl.where((number < part)[:, None], own, 0), axis=0)
    begin = tl.cumsum(total, axis=0) - total
    tiles = tl.cdiv(total, ROWS)
    last_tile = tl.cumsum(tiles, axis=0)
    if part == 0:
        tl.store(plan.ends + bins, begin + total, mask=bins < EXPERTS)
    for first in range(part * STEP, bound, parts * STEP):
        tile = first + step
        passed = (last_tile[None, :] <= tile[:, None]) & (bins < EXPERTS)[None, :]
        expert = tl.sum(passed.to(tl.int32), axis=1)
        here = bins[None, :] == expert[:, None]
        origin = tl.sum(tl.where(here, (begin - (last_tile - tiles) * ROWS)[None, :], 0), axis=1)
        tl.store(plan.tile_expert + tile, tl.where(expert < EXPERTS, expert, -1), mask=tile < bound)
        mask = (tile < bound) & (expert < EXPERTS)
        tl.store(plan.tile_first + tile, origin + tile * ROWS, mask=mask)
    following = begin + before
    for first in range(part * PART, part * PART + PART, STEP):
        index = first + step
        chosen = tl.load(ids + index, mask=index < pairs, other=EXPERTS).to(tl.int32)
        here = (chosen[:, None] == bins[None, :]).to(tl.int32)
        places = following[None, :] + tl.cumsum(here, axis=0) - 1
        place = tl.sum(tl.where(here > 0, places, 0), axis=1)
        tl.store(plan.order + place, index, mask=index < pairs)
        following += tl.sum(here, axis=0)


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
    bins = power_of_two(experts + 1, LEAST_BINS)
    arguments = {"ids": ids.contiguous(), "pairs": pairs, "EXPERTS": experts, "BINS": bins}
    tiles = {"plan": plan, "bound": bound, "ROWS": rows}
    if pairs <= FEW:
        launch(_align_kernel, (experts,), {**arguments, **tiles, "CHUNK": CHUNK})
        return plan
    parts = triton.cdiv(pairs, PART)
    counts = torch.empty(parts, bins, dtype=torch.int32, device=ids.device)
    arguments |= {"counts": counts, "PART": PART}
    launch(_count_kernel, (parts,), arguments)
    launch(_place_kernel, (parts,), {**arguments, **tiles, "STEP": STEP}, num_warps=8)
    return plan
