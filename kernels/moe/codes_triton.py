"""The grouped products of routed experts whose weights are quantised, on a GPU."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from vlm_serve.kernels.linear.codes_triton import grouped_product


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
    """silu(x gate^T) * (x up^T) for up to ROWS sorted (token, expert) pairs of one expert."""
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert >= 0:
        pairs = tl.load(tile_first + tile) + tl.arange(0, ROWS)
        real = pairs < tl.load(ends + expert)
        token = tl.load(order + pairs, mask=real, other=0) // TOP_K
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < WIDTH
        x_rows = token.to(tl.int64) * x_stride
        first = expert * (2 * WIDTH) + columns
        gate = grouped_product(
            x,
            x_rows,
            real,
            codes,
            scales,
            zeros,
            factors,
            first,
            inside,
            code_stride,
            scale_stride,
            HIDDEN,
            GROUP,
            FORM,
            ZEROS,
            SCALES,
            ROWS,
            COLUMNS,
            STEP,
            DOT,
            PRECISION,
        )
        up = grouped_product(
            x,
            x_rows,
            real,
            codes,
            scales,
            zeros,
            factors,
            first + WIDTH,
            inside,
            code_stride,
            scale_stride,
            HIDDEN,
            GROUP,
            FORM,
            ZEROS,
            SCALES,
            ROWS,
            COLUMNS,
            STEP,
            DOT,
            PRECISION,
        )
        result = gate * tl.sigmoid(gate) * up
        places = pairs.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        mask = real[:, None] & inside[None, :]
        tl.store(out + places, result.to(out.dtype.element_ty), mask=mask)


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
    """weight * x down^T, stored at the pair's place in token order."""
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert >= 0:
        pairs = tl.load(tile_first + tile) + tl.arange(0, ROWS)
        real = pairs < tl.load(ends + expert)
        pair = tl.load(order + pairs, mask=real, other=0).to(tl.int64)
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < HIDDEN
        total = grouped_product(
            x,
            pairs.to(tl.int64) * WIDTH,
            real,
            codes,
            scales,
            zeros,
            factors,
            expert * HIDDEN + columns,
            inside,
            code_stride,
            scale_stride,
            WIDTH,
            GROUP,
            FORM,
            ZEROS,
            SCALES,
            ROWS,
            COLUMNS,
            STEP,
            DOT,
            PRECISION,
        )
        share = tl.load(weights + pair, mask=real, other=0.0).to(tl.float32)
        total *= share[:, None]
        mask = real[:, None] & inside[None, :]
        places = pair[:, None] * HIDDEN + columns[None, :]
        tl.store(out + places, total.to(out.dtype.element_ty), mask=mask)
