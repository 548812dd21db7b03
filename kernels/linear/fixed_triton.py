"""Products of any number of rows with plain weights on a GPU, in one launch and one order over K.

Programs, one for each multiprocessor, take tiles of the result in turn. A tile's shape follows from
the weight alone, and its sums run over the depth in ascending order, so a row has the same bits
alone and among thousands. A weight is read once for a band of tiles of rows. The changes of
adapters are added to the sums, by those programs whose rows have any.
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
from vlm_serve.kernels.linear.low_rank_factors import Reduced
from vlm_serve.kernels.linear.low_rank_triton import (
    ACTIVATIONS,
    changes_of,
    finished,
    sizes_of,
    tile_changed,
)
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


# The numbers of rows and adapters differ between steps: specialising on them would recompile.
@triton.jit(do_not_specialize=["rows", "adapters"])
def _fixed_kernel(
    x,
    weight,
    bias,
    times,
    plus,
    out,
    changes,
    rows,
    adapters,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
    LOW_RANK: tl.constexpr,
    CHANGED_ALONE: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Compute tiles in turn; with CHANGED_ALONE those rows that have a change, and no others."""
    high = tl.cdiv(rows, TILE.rows)
    wide = (WIDTH + TILE.columns - 1) // TILE.columns
    for tile in range(tl.program_id(0), high * wide, tl.num_programs(0)):
        first = tile // (BAND * wide) * BAND
        band = tl.minimum(high - first, BAND)
        within = tile - first * wide
        row = (first + within % band) * TILE.rows + tl.arange(0, TILE.rows)
        column = within // band * TILE.columns + tl.arange(0, TILE.columns)
        if changes is None:
            total = _sums(x, weight, bias, row, column, rows, WIDTH, SIZE, TILE, DOT)
            _store(total, times, plus, out, row, column, row < rows, WIDTH, ACTIVATION)
        else:
            owner = tl.load(changes.adapters + row, mask=row < rows, other=-1)
            record = changes.records + owner * changes.record_stride
            real = row < rows
            if CHANGED_ALONE:
                real = tl.load(record + 2, mask=owner >= 0, other=0) > 0
            if tl.max(real.to(tl.int32), axis=0) > 0:
                total = _sums(x, weight, bias, row, column, rows, WIDTH, SIZE, TILE, DOT)
                total = tile_changed(
                    total, changes, owner, row, rows, column, adapters, LOW_RANK, DOT.precision
                )
                _store(total, times, plus, out, row, column, real, WIDTH, ACTIVATION)


@triton.jit
def _sums(
    x,
    weight,
    bias,
    row,
    column,
    rows,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Return the sums of a tile, float32 `[ROWS, COLUMNS]`."""
    DEPTH: tl.constexpr = TILE.depth
    depth = tl.arange(0, DEPTH)
    # Loads without masks: what is past the end reads the last row or column.
    x_rows = x.at + tl.minimum(row, rows - 1).to(tl.int64) * x.stride
    own = weight.at + tl.minimum(column, WIDTH - 1).to(tl.int64) * weight.stride
    total = tl.zeros((TILE.rows, TILE.columns), tl.float32)
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
    if bias is not None:
        total += tl.load(bias + tl.minimum(column, WIDTH - 1)).to(tl.float32)[None, :]
    return total


@triton.jit
def _store(
    total, times, plus, out, row, column, real, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr
):
    """Write the results of a tile's rows where they are real."""
    mask = real[:, None] & (column < WIDTH)[None, :]
    total = finished(total, times, plus, row.to(tl.int64), column, mask, ACTIVATION)
    places = out.at + (row.to(tl.int64) * out.stride)[:, None] + column[None, :]
    tl.store(places, total.to(out.at.dtype.element_ty), mask=mask)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    after: Epilogue = NOTHING,
    kind: torch.dtype | None = None,
    change: Reduced | None = None,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply; a sum that follows is rounded once, with the product."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, size), width, plus, kind = x.shape, len(weight), after.plus, kind or x.dtype
    if into is not None:
        out = into
    elif plus is not None and after.overwrite and plus.dtype == kind:
        out = plus
    else:
        out = torch.empty(rows, width, dtype=kind, device=x.device)
    tile = tile_of(x.dtype, width)
    arguments = {
        "x": rows_of(x),
        "weight": rows_of(weight),
        "bias": bias,
        "times": None if into is None or after.times is None else rows_of(after.times),
        "plus": None if plus is None else rows_of(plus),
        "out": rows_of(out),
        "changes": None if change is None else changes_of(change),
        "rows": rows,
        "adapters": 0 if change is None else len(change.site.records),
        "WIDTH": width,
        "SIZE": size,
        "TILE": constants(FixedTile, *tile),
        "DOT": dots(x.dtype),
        "LOW_RANK": (0, 0, 0) if change is None else sizes_of(change.u),
        "CHANGED_ALONE": into is not None,
        "ACTIVATION": ACTIVATIONS[None if into is None else after.activation],
    }
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(width, tile.columns)
    programs = MULTIPROCESSORS
    if x.device.type == "cuda":
        programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    grid = (min(tiles, programs),)
    launch(_fixed_kernel, grid, arguments, num_warps=tile.warps, num_stages=tile.stages)
    return out if into is not None else followed(out, after._replace(plus=None))
