"""Grouped products of routed experts on a GPU, plain or quantised, with adapters or not.

Pairs are in tiles of one expert, with adapters too, so that a weight is read once for all of them.
Sums have one order and one shape of tiles: a pair without an adapter has the bits of the base.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.linear.codes_triton import grouped_product
from vlm_serve.kernels.moe.align_triton import store_gated, store_weighted, tile_pairs
from vlm_serve.kernels.moe.pair_changes_triton import with_part


class Plain(NamedTuple):
    """Weights of all experts, not quantised: a pointer, and the strides of experts and of rows."""

    at: torch.Tensor
    expert: int
    row: int


class Sizes(NamedTuple):
    """Constants: experts of a token, widths, and the tile of a program."""

    top_k: int
    hidden: int
    width: int
    rows: int
    columns: int
    depth: int


@triton.jit
def _both_products(
    x, x_rows, real, weight, expert, columns, SIZES: tl.constexpr, DOT: tl.constexpr
):
    """Multiply rows by a gate's columns of plain weights, and by those of `up` behind them."""
    HIDDEN: tl.constexpr = SIZES.hidden
    depth = tl.arange(0, SIZES.depth)
    own = weight.at + expert * weight.expert + columns.to(tl.int64) * weight.row
    gate = tl.zeros((SIZES.rows, SIZES.columns), tl.float32)
    up = tl.zeros((SIZES.rows, SIZES.columns), tl.float32)
    for start in range(0, HIDDEN, SIZES.depth):
        at = start + depth
        inside = (at < HIDDEN)[:, None] & (columns < SIZES.width)[None, :]
        mask = real[:, None] & (at < HIDDEN)[None, :]
        rows = tl.load(x.at + x_rows[:, None] + at[None, :], mask=mask, other=0.0).to(DOT.dtype)
        part = tl.load(own[None, :] + at[:, None], mask=inside, other=0.0).to(DOT.dtype)
        gate = tl.dot(rows, part, gate, input_precision=DOT.precision)
        below = own[None, :] + SIZES.width * weight.row
        part = tl.load(below + at[:, None], mask=inside, other=0.0).to(DOT.dtype)
        up = tl.dot(rows, part, up, input_precision=DOT.precision)
    return gate, up


@triton.jit
def _own_product(x, x_rows, real, weight, expert, columns, SIZES: tl.constexpr, DOT: tl.constexpr):
    """Multiply rows of sorted pairs by columns of an expert's plain weight."""
    WIDTH: tl.constexpr = SIZES.width
    depth = tl.arange(0, SIZES.depth)
    own = weight.at + expert * weight.expert + columns.to(tl.int64) * weight.row
    total = tl.zeros((SIZES.rows, SIZES.columns), tl.float32)
    for start in range(0, WIDTH, SIZES.depth):
        at = start + depth
        inside = (at < WIDTH)[:, None] & (columns < SIZES.hidden)[None, :]
        mask = real[:, None] & (at < WIDTH)[None, :]
        rows = tl.load(x.at + x_rows[:, None] + at[None, :], mask=mask, other=0.0).to(DOT.dtype)
        part = tl.load(own[None, :] + at[:, None], mask=inside, other=0.0).to(DOT.dtype)
        total = tl.dot(rows, part, total, input_precision=DOT.precision)
    return total


@triton.jit
def _product(
    x_rows,
    weight,
    columns,
    inside,
    SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
    LAYOUT: tl.constexpr,
    DOT: tl.constexpr,
):
    """Multiply rows by columns of all experts' weights; see `grouped_product`."""
    if LAYOUT is not None:
        total = grouped_product(x_rows, weight, columns, inside, SIZE, LAYOUT, DOT)
    else:
        x, x_places, real = x_rows
        own = weight.at + columns * weight.row
        total = tl.zeros((real.shape[0], columns.shape[0]), tl.float32)
        for start in range(0, SIZE, DEPTH):
            at = start + tl.arange(0, DEPTH)
            known = at < SIZE
            wanted = real[:, None] & known[None, :]
            rows = tl.load(x + x_places[:, None] + at[None, :], mask=wanted, other=0.0)
            rows = rows.to(DOT.dtype)
            wanted = known[:, None] & inside[None, :]
            part = tl.load(own[None, :] + at[:, None], mask=wanted, other=0.0).to(DOT.dtype)
            total = tl.dot(rows, part, total, input_precision=DOT.precision)
    return total


# The numbers of pairs and adapters differ between steps: specialising on them would recompile while
# serving.
@triton.jit(do_not_specialize=["count", "slots"])
def gate_up_kernel(
    x,
    weight,
    out,
    plan,
    changes,
    count,
    slots,
    LAYOUT: tl.constexpr,
    SIZES: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute silu(x gate^T) * (x up^T) for a tile of sorted (token, expert) pairs of one expert.

    LAYOUT: of codes; None: the weight is `Plain`. changes: of adapters, `count` pairs and `slots`
    adapters; None: there are none.
    """
    WIDTH: tl.constexpr = SIZES.width
    tile = tl.program_id(1)
    expert = tl.load(plan.tile_expert + tile).to(tl.int64)
    if expert >= 0:
        pairs, real, origin = tile_pairs(plan, tile, expert, SIZES.rows)
        token = origin // SIZES.top_k
        if changes is not None:
            owner = tl.load(changes.adapters + token, mask=real, other=-1)
        columns = tl.program_id(0) * SIZES.columns + tl.arange(0, SIZES.columns)
        if LAYOUT is None and changes is None:
            x_rows = token.to(tl.int64) * x.stride
            gate, up = _both_products(x, x_rows, real, weight, expert, columns, SIZES, DOT)
        else:
            inside = columns < WIDTH
            rows = (x.at, token.to(tl.int64) * x.stride, real)
            first = expert * (2 * WIDTH) + columns
            gate = _product(rows, weight, first, inside, SIZES.hidden, SIZES.depth, LAYOUT, DOT)
            first += WIDTH
            up = _product(rows, weight, first, inside, SIZES.hidden, SIZES.depth, LAYOUT, DOT)
        if changes is not None:
            members, counts = (expert, pairs, owner), (count, slots)
            gate = with_part(gate, members, changes, counts, columns, 0, WIDTH, DOT)
            up = with_part(up, members, changes, counts, columns, 1, WIDTH, DOT)
        store_gated(out, gate, up, pairs, real, columns, WIDTH)


@triton.jit(do_not_specialize=["count", "slots"])
def down_kernel(
    x,
    weight,
    weights,
    out,
    plan,
    changes,
    count,
    slots,
    LAYOUT: tl.constexpr,
    SIZES: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute weight * x down^T, stored at the pair's place in token order; see
    `gate_up_kernel`."""
    HIDDEN: tl.constexpr = SIZES.hidden
    tile = tl.program_id(1)
    expert = tl.load(plan.tile_expert + tile).to(tl.int64)
    if expert >= 0:
        pairs, real, origin = tile_pairs(plan, tile, expert, SIZES.rows)
        if changes is None:
            pair = origin.to(tl.int64)
        else:
            owner = tl.load(changes.adapters + origin // SIZES.top_k, mask=real, other=-1)
        columns = tl.program_id(0) * SIZES.columns + tl.arange(0, SIZES.columns)
        if LAYOUT is None and changes is None:
            x_rows = pairs.to(tl.int64) * SIZES.width
            total = _own_product(x, x_rows, real, weight, expert, columns, SIZES, DOT)
        else:
            inside = columns < HIDDEN
            rows = (x.at, pairs.to(tl.int64) * SIZES.width, real)
            first = expert * HIDDEN + columns
            total = _product(rows, weight, first, inside, SIZES.width, SIZES.depth, LAYOUT, DOT)
        if changes is not None:
            members, counts = (expert, pairs, owner), (count, slots)
            total = with_part(total, members, changes, counts, columns, 0, HIDDEN, DOT)
            pair = origin.to(tl.int64)
        store_weighted(out, weights, total, pair, real, columns, HIDDEN)
