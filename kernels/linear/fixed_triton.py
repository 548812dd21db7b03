"""Products of any number of rows with plain weights on a GPU, in one launch and one order over K.

Programs, one for each multiprocessor, take tiles of the result in turn. A tile's shape follows from
the weight alone, and its sums run over the depth in ascending order, so a row has the same bits
alone and among thousands. A weight is read once for a band of tiles of rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.linear.base import Epilogue
from vlm_serve.kernels.linear.fixed import NOTHING, followed
from vlm_serve.kernels.triton_support import current_target, launch
from vlm_serve.kernels.triton_views import constants, dots
from vlm_serve.kernels.triton_views import rows as rows_of
from vlm_serve.kernels.tuning import NARROW_BELOW, tuned

MULTIPROCESSORS = 132
"""Of what is no GPU."""
BAND = tl.constexpr(16)
"""Tiles of rows whose results are computed beside each other: their rows stay in the cache."""


class FixedTile(NamedTuple):
    """Rows and columns of a tile, depth of a step, warps, and steps in flight."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tile_of(dtype: torch.dtype, columns: int) -> FixedTile:
    """Return the tile; the number of rows has no part in it."""
    target, narrow = current_target(), columns < NARROW_BELOW
    if dtype == torch.float32:
        return FixedTile(64, 32, 32, 4, 1 if target.backend == "hip" else 4)
    usual = FixedTile(128, 64, 64, 4, 4) if narrow else FixedTile(128, 128, 64, 8, 4)
    if target.backend == "hip":
        return usual._replace(warps=8, stages=1)

    def shared(tile: Mapping[str, int]) -> int:
        """Return the bytes of 16-bit tiles in flight: three of four stages fill consumer cards."""
        buffers = tile["stages"] - (0 if target.roomy else 1)
        return 2 * buffers * tile["depth"] * (tile["rows"] + tile["columns"])

    op = "fixed product, narrow" if narrow else "fixed product"
    return FixedTile(**tuned(op, target, usual._asdict(), shared))


# The number of rows differs between steps: specialising on it would recompile while serving.
@triton.jit(do_not_specialize=["rows"])
def _fixed_kernel(
    x,
    weight,
    bias,
    plus,
    out,
    rows,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
):
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    DEPTH: tl.constexpr = TILE.depth
    high = tl.cdiv(rows, ROWS)
    wide = (WIDTH + COLUMNS - 1) // COLUMNS
    depth = tl.arange(0, DEPTH)
    for tile in range(tl.program_id(0), high * wide, tl.num_programs(0)):
        first = tile // (BAND * wide) * BAND
        band = tl.minimum(high - first, BAND)
        within = tile - first * wide
        row = (first + within % band) * ROWS + tl.arange(0, ROWS)
        column = within // band * COLUMNS + tl.arange(0, COLUMNS)
        # Loads without masks: what is past the end reads the last row or column.
        x_rows = x.at + tl.minimum(row, rows - 1).to(tl.int64) * x.stride
        own = weight.at + tl.minimum(column, WIDTH - 1).to(tl.int64) * weight.stride
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, SIZE, DEPTH):
            at = start + depth
            if SIZE % DEPTH == 0:
                values = tl.load(x_rows[:, None] + at[None, :])
                part = tl.load(own[None, :] + at[:, None])
            else:
                values = tl.load(x_rows[:, None] + at[None, :], mask=(at < SIZE)[None, :], other=0)
                part = tl.load(own[None, :] + at[:, None], mask=(at < SIZE)[:, None], other=0)
            values, part = values.to(DOT.dtype), part.to(DOT.dtype)
            total = tl.dot(values, part, total, input_precision=DOT.precision)
        mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
        if bias is not None:
            total += tl.load(bias + tl.minimum(column, WIDTH - 1)).to(tl.float32)[None, :]
        if plus is not None:
            places = plus.at + (row.to(tl.int64) * plus.stride)[:, None] + column[None, :]
            total += tl.load(places, mask=mask, other=0.0).to(tl.float32)
        places = out.at + (row.to(tl.int64) * out.stride)[:, None] + column[None, :]
        tl.store(places, total.to(out.at.dtype.element_ty), mask=mask)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    after: Epilogue = NOTHING,
    kind: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply; a sum that follows is rounded once, with the product."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, size), width, plus, kind = x.shape, len(weight), after.plus, kind or x.dtype
    if plus is not None and after.overwrite and plus.dtype == kind:
        out = plus
    else:
        out = torch.empty(rows, width, dtype=kind, device=x.device)
    tile = tile_of(x.dtype, width)
    arguments = {
        "x": rows_of(x),
        "weight": rows_of(weight),
        "bias": bias,
        "plus": None if plus is None else rows_of(plus),
        "out": rows_of(out),
        "rows": rows,
        "WIDTH": width,
        "SIZE": size,
        "TILE": constants(FixedTile, *tile),
        "DOT": dots(x.dtype),
    }
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(width, tile.columns)
    programs = MULTIPROCESSORS
    if x.device.type == "cuda":
        programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    grid = (min(tiles, programs),)
    launch(_fixed_kernel, grid, arguments, num_warps=tile.warps, num_stages=tile.stages)
    return followed(out, after._replace(plus=None))
