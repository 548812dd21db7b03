"""Grouped products of routed experts with quantised weights, on a GPU."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from vlm_serve.kernels.linear.codes_triton import grouped_product
from vlm_serve.kernels.moe.pairs_triton import store_gated, store_weighted, tile_pairs


@triton.jit
def gate_up_codes_kernel(
    x,
    order,
    tile_expert,
    tile_first,
    ends,
    codes,
    scales,
    zeros,
    factors,
    out,
    x_stride,
    code_stride,
    scale_stride,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    FORM: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALES: tl.constexpr,
    STEP: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute silu(x gate^T) * (x up^T) for up to ROWS sorted (token, expert) pairs of one
    expert."""
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert >= 0:
        pairs, real, origin = tile_pairs(order, tile_first, ends, tile, expert, ROWS)
        token = origin // TOP_K
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < WIDTH
        rows = (x, token.to(tl.int64) * x_stride, real)
        first = expert * (2 * WIDTH) + columns
        weight = (codes, scales, zeros, factors, code_stride, scale_stride)
        gate = grouped_product(
            rows, weight, first, inside, HIDDEN, (GROUP, FORM, ZEROS, SCALES), STEP, DOT, PRECISION
        )
        first += WIDTH
        up = grouped_product(
            rows, weight, first, inside, HIDDEN, (GROUP, FORM, ZEROS, SCALES), STEP, DOT, PRECISION
        )
        store_gated(out, gate, up, pairs, real, columns, WIDTH)


@triton.jit
def down_codes_kernel(
    x,
    order,
    weights,
    tile_expert,
    tile_first,
    ends,
    codes,
    scales,
    zeros,
    factors,
    out,
    code_stride,
    scale_stride,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    FORM: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALES: tl.constexpr,
    STEP: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute weight * x down^T, stored at the pair's place in token order."""
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert >= 0:
        pairs, real, origin = tile_pairs(order, tile_first, ends, tile, expert, ROWS)
        pair = origin.to(tl.int64)
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < HIDDEN
        weight = (codes, scales, zeros, factors, code_stride, scale_stride)
        rows = (x, pairs.to(tl.int64) * WIDTH, real)
        first = expert * HIDDEN + columns
        total = grouped_product(
            rows, weight, first, inside, WIDTH, (GROUP, FORM, ZEROS, SCALES), STEP, DOT, PRECISION
        )
        store_weighted(out, weights, total, pair, real, columns, HIDDEN)
