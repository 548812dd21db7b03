"""Tiles of (token, expert) pairs, shared by the grouped products of plain and quantised weights."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl


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
