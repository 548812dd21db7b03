"""What adapters add to the products of routed experts on a GPU, for pairs in tiles of one expert.

A program takes the adapters of its tile one by one, each for all its pairs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.linear.low_rank_factors import HEAD, PART, RANKS, SPAN, Site
from vlm_serve.kernels.linear.low_rank_triton import DEPTH, _factor, sizes_of
from vlm_serve.kernels.moe.align_triton import TilePlan, tile_pairs
from vlm_serve.kernels.triton_support import current_target, launch
from vlm_serve.kernels.triton_views import Rows, constants
from vlm_serve.kernels.triton_views import rows as rows_of

# Places in a record; see `records_of`.
_HEAD = tl.constexpr(HEAD)
_PART = tl.constexpr(PART)


class PairChanges(NamedTuple):
    """What products read of adapters.

    Attributes:
        adapters: of tokens, -1 for none.
        records: of adapters.
        u: float32 `[splits, pairs, width]`.
        splits, parts, ranks: constants, `sizes_of(u)`.
    """

    adapters: torch.Tensor
    records: Rows
    u: torch.Tensor
    width: int
    splits: Any
    parts: Any
    ranks: Any


class _Sizes(NamedTuple):
    """Constants: the depth and its parts, experts of a token, and the tile of a program."""

    size: int
    top_k: int
    by_pair: bool
    span: int
    rows: int
    ranks: int
    depth: int
    precision: str


@triton.jit
def _place_of(record, expert, mine):
    """Return the place of an expert's factors in an adapter; -1: there are none, or no pair is
    `mine`."""
    asked = (tl.max(mine.to(tl.int32), axis=0) > 0) & (tl.load(record + 2) > 0)
    table = tl.load(record + 5).to(tl.pointer_type(tl.int32))
    return tl.load(table + expert, mask=asked, other=-1).to(tl.int64)


# The numbers of pairs and adapters differ between steps: specialising on them would recompile while
# serving.
@triton.jit(do_not_specialize=["count", "slots"])
def _experts_down_kernel(x, plan, changes, count, slots, SIZES: tl.constexpr):
    """Compute some elements of u of a tile's pairs, over a part of the depth."""
    SIZE: tl.constexpr = SIZES.size
    RANKS: tl.constexpr = SIZES.ranks
    DEPTH: tl.constexpr = SIZES.depth
    tile = tl.program_id(0)
    expert = tl.load(plan.tile_expert + tile).to(tl.int64)
    if expert >= 0:
        pairs, real, origin = tile_pairs(plan, tile, expert, SIZES.rows)
        token = origin // SIZES.top_k
        owner = tl.load(changes.adapters + token, mask=real, other=-1)
        source = pairs if SIZES.by_pair else token
        x_rows = source.to(tl.int64) * x.stride
        split, first = tl.program_id(2), tl.program_id(1) * RANKS
        rank = first + tl.arange(0, RANKS)
        for each in range(slots):
            mine = owner == each
            record = changes.records.at + each * changes.records.stride
            place, ranks = _place_of(record, expert, mine), tl.load(record + 2)
            if (place >= 0) & (first < ranks):
                known = rank < ranks
                down, kind = tl.load(record), tl.load(record + 3)
                total = tl.zeros((SIZES.rows, RANKS), tl.float32)
                for start in range(0, SIZES.span, DEPTH):
                    at = split * SIZES.span + start + tl.arange(0, DEPTH)
                    inside = at < SIZE
                    wanted = mine[:, None] & inside[None, :]
                    places = x_rows[:, None] + at[None, :]
                    values = tl.load(x.at + places, mask=wanted, other=0.0).to(tl.float32)
                    places = (place * ranks + rank)[None, :] * SIZE + at[:, None]
                    part = _factor(down, places, known[None, :] & inside[:, None], kind)
                    total = tl.dot(values, part, total, input_precision=SIZES.precision)
                scales = tl.load(record + 1).to(tl.pointer_type(tl.float32)) + place * ranks
                total *= tl.load(scales + rank, mask=known, other=0.0)[None, :]
                places = (split * count + pairs.to(tl.int64))[:, None] * changes.width + rank[
                    None, :
                ]
                tl.store(changes.u + places, total, mask=mine[:, None] & known[None, :])


@triton.jit
def with_part(
    total,
    tile,
    changes,
    counts,
    columns,
    NUMBER: tl.constexpr,
    SIZE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Return sums of a tile's pairs with what their adapters add to a part of the weight.

    Args:
        total: float32 `[ROWS, COLUMNS]`.
        tile: the expert, its pairs `[ROWS]` and their adapters, -1 for none.
        changes: `PairChanges`; counts: the numbers of pairs and adapters.
        columns: of the part, which has SIZE of them.
        NUMBER: of the part.
    """
    expert, pairs, owner = tile
    count, slots = counts
    SPLITS: tl.constexpr = changes.splits
    PARTS: tl.constexpr = changes.parts
    RANKS: tl.constexpr = changes.ranks
    split, inside = tl.arange(0, PARTS), columns < SIZE
    row = pairs.to(tl.int64)
    for each in range(slots):
        mine = owner == each
        record = changes.records.at + each * changes.records.stride
        place = _place_of(record, expert, mine)
        if place >= 0:
            part = record + _HEAD + NUMBER * _PART
            offset, ranks = tl.load(part + 2).to(tl.int32), tl.load(part + 3).to(tl.int32)
            up, kind = tl.load(part + 4), tl.load(part + 5)
            added = tl.zeros(total.shape, tl.float32)
            for start in tl.range(0, ranks, RANKS, num_stages=1):
                rank = start + tl.arange(0, RANKS)
                known = rank < ranks
                summed = (split[:, None, None] * count + row[None, :, None]) * changes.width
                summed += (offset + rank)[None, None, :]
                wanted = mine[:, None] & known[None, :]
                wanted = wanted[None, :, :] & (split < SPLITS)[:, None, None]
                own = tl.sum(tl.load(changes.u + summed, mask=wanted, other=0.0), axis=0)
                places = (place * SIZE + columns)[None, :] * ranks + rank[:, None]
                values = _factor(up, places, known[:, None] & inside[None, :], kind)
                added = tl.dot(own, values, added, input_precision=DOT.precision)
            total = tl.where(mine[:, None], total + added, total)
    return total


def pair_changes(
    x: torch.Tensor,
    site: Site,
    plan: TilePlan,
    rows: int,
    top_k: int,
    *,
    by_pair: bool,
) -> PairChanges:
    """Compute u of all pairs. Return what the products' kernels take of it.

    Args:
        x: rows of tokens; `by_pair`: of sorted pairs.
        plan: of `align`, with tiles of so many rows.
    """
    size, pairs = x.shape[1], len(plan.order)
    splits, width = triton.cdiv(size, SPAN), RANKS * triton.cdiv(max(1, site.width), RANKS)
    u = torch.empty(splits, pairs, width, dtype=torch.float32, device=x.device)
    changes = PairChanges(
        site.groups.adapters, rows_of(site.records), u, width, *map(tl.constexpr, sizes_of(u))
    )
    span = min(SPAN, DEPTH * triton.cdiv(size, DEPTH))
    precision = current_target().dot_precision
    arguments = {
        "x": rows_of(x),
        "plan": plan,
        "changes": changes,
        "count": pairs,
        "slots": len(site.records),
        "SIZES": constants(_Sizes, size, top_k, by_pair, span, rows, RANKS, DEPTH, precision),
    }
    grid = (len(plan.tile_expert), width // RANKS, splits)
    launch(_experts_down_kernel, grid, arguments, num_warps=4)
    return changes
