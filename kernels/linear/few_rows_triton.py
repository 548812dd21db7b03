"""Products of a few rows with plain weights on a GPU.

A program multiplies all rows, padded to the smallest dot, with some columns over the whole depth.
So each weight is read once, by one program, and no sum is shared.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear.few_rows import MOST_ROWS, Around
from vlm_serve.kernels.linear.low_rank_triton import changes_of, few_changed, sizes_of
from vlm_serve.kernels.triton_support import current_target, dot_dtype, launch
from vlm_serve.kernels.tuning import NARROW_BELOW, tuned

ROWS = 16
"""Rows of the smallest dot."""


class FewRowsTile(NamedTuple):
    """Columns of a program, depth of a step, warps, and steps in flight."""

    columns: int
    depth: int
    warps: int
    stages: int


def tile_of(dtype: torch.dtype, columns: int, gated: bool = False) -> FewRowsTile:
    """Return the tile; the number of rows has no part in it."""
    if dtype == torch.float32:
        return FewRowsTile(32, 32, 4, 1)
    target, narrow = current_target(), columns < NARROW_BELOW
    stages = 1 if target.backend == "hip" else 4
    usual = FewRowsTile(16, 256, 2, stages) if narrow else FewRowsTile(32, 128, 4, stages)

    def shared(tile: Mapping[str, int]) -> int:
        """Return the bytes of 16-bit tiles in flight: weights and rows."""
        width = (2 if gated else 1) * tile["columns"] + ROWS
        return 2 * tile["stages"] * tile["depth"] * width

    op = "few rows, narrow" if narrow else "few rows"
    return FewRowsTile(**tuned(op, target, usual._asdict(), shared))


# The number of rows differs between steps: specialising on it would recompile while serving.
@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x,
    norm,
    weight,
    plus,
    out,
    changes,
    rows,
    x_stride,
    weight_stride,
    plus_stride,
    out_stride,
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    PLUS: tl.constexpr,
    LOW_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    index = tl.arange(0, ROWS)
    real = index < rows
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    within = columns < WIDTH
    dtype = x.dtype.element_ty
    row = index.to(tl.int64)
    x_rows = row * x_stride
    own = weight + columns.to(tl.int64) * weight_stride
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for start in range(0, SIZE, DEPTH):
        at = start + depth
        known = at < SIZE
        values = tl.load(
            x + x_rows[:, None] + at[None, :], mask=real[:, None] & known[None, :], other=0.0
        )
        if NORM:
            wide = values.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            factor = 1.0 + tl.load(norm + at, mask=known, other=0.0).to(tl.float32)
            values = (wide * factor[None, :]).to(dtype)
        inside = known[:, None] & within[None, :]
        part = tl.load(own[None, :] + at[:, None], mask=inside, other=0.0)
        total = tl.dot(values.to(DOT), part.to(DOT), total, input_precision=PRECISION)
        if GATED:
            below = own[None, :] + WIDTH * weight_stride
            part = tl.load(below + at[:, None], mask=inside, other=0.0)
            up = tl.dot(values.to(DOT), part.to(DOT), up, input_precision=PRECISION)
    if changes is not None:
        # Before the norm's factor, which u has not had either.
        total = few_changed(total, changes, index, rows, columns, LOW_RANK, PRECISION)
        if GATED:
            up = few_changed(up, changes, index, rows, columns + WIDTH, LOW_RANK, PRECISION)
    if NORM:
        scale = tl.rsqrt(squares / SIZE + eps)
        total *= scale[:, None]
        up *= scale[:, None]
    mask = real[:, None] & within[None, :]
    if GATED:
        # Rounded before the activation, as where both products have results of their own.
        gate = total.to(dtype).to(tl.float32)
        total = up.to(dtype).to(tl.float32) * gate / (1.0 + tl.exp(-gate))
    if PLUS:
        places = row[:, None] * plus_stride + columns[None, :]
        total += tl.load(plus + places, mask=mask, other=0.0).to(tl.float32)
    places = row[:, None] * out_stride + columns[None, :]
    tl.store(out + places, total.to(dtype).to(out.dtype.element_ty), mask=mask)


def few_rows(x: torch.Tensor, weight: torch.Tensor, around: Around) -> torch.Tensor:
    norm, eps, gated, plus, overwrite, widened, change = around
    rows, size = x.shape
    if rows > MOST_ROWS:
        raise KernelArgumentError("x", f"{rows} rows, at most {MOST_ROWS}")
    if norm is not None and x.dtype == torch.float16:
        raise KernelArgumentError("x", "float16 rows take their norm before the product")
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    if plus is not None and overwrite:
        out = plus
    else:
        kind = torch.float32 if widened else x.dtype
        out = torch.empty(rows, width, dtype=kind, device=x.device)
    tile = tile_of(x.dtype, width, gated)
    arguments = {
        "x": x,
        # Any pointer takes the place of what there is not; it is never read.
        "norm": x if norm is None else norm,
        "weight": weight,
        "plus": x if plus is None else plus,
        "out": out,
        "changes": None if change is None else changes_of(change),
        "rows": rows,
        "x_stride": x.stride(0),
        "weight_stride": weight.stride(0),
        "plus_stride": 0 if plus is None else plus.stride(0),
        "out_stride": out.stride(0),
        "eps": eps,
        "SIZE": size,
        "WIDTH": width,
        "NORM": norm is not None,
        "GATED": gated,
        "PLUS": plus is not None,
        "LOW_RANK": (0, 0, 0) if change is None else sizes_of(change.u),
        "ROWS": ROWS,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "DOT": dot_dtype(x.dtype),
        "PRECISION": current_target().dot_precision,
    }
    grid = (triton.cdiv(width, tile.columns),)
    launch(_few_rows_kernel, grid, arguments, num_warps=tile.warps, num_stages=tile.stages)
    return out
