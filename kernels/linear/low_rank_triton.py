"""Low-rank changes on a GPU: `u = scale * (x A^T)`, then `+ u B^T`, for rows of several adapters.

A program of `_down_kernel` multiplies a tile of rows by some rows of their adapter's A, over a part
of the depth. Parts are of one length, and what reads u sums them in one order. Products are those
of float32. So a row's bits depend on the row and its own adapter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.linear.base import Epilogue
from vlm_serve.kernels.linear.low_rank_factors import (
    HEAD,
    PART,
    RANKS,
    SPAN,
    TILE,
    Reduced,
    Site,
)
from vlm_serve.kernels.triton_support import current_target, launch, power_of_two
from vlm_serve.kernels.triton_views import rows as rows_of

DEPTH = 64
COLUMNS = 64

# Places in a record; see `records_of`.
_HEAD = tl.constexpr(HEAD)
_PART = tl.constexpr(PART)
# Numbers of `KINDS`.
_FLOAT32 = tl.constexpr(0)
_BFLOAT16 = tl.constexpr(1)
ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu2": 4}
"""Numbers of activations in `finished`."""


class Changes(NamedTuple):
    """Operands from which kernels of rows in the order of a step add changes.

    Attributes:
        u: float32 `[splits, rows, width]`.
        records: of the adapters, see `records_of`.
        adapters: int32, the number of each row's adapter, -1 for none.
        width: elements of u.
        record_stride: numbers from one record to the next.
    """

    u: torch.Tensor
    records: torch.Tensor
    adapters: torch.Tensor
    width: int
    record_stride: int


@triton.jit
def _factor(address, places, mask, kind):
    """Return values of a factor in float32."""
    if kind == _FLOAT32:
        values = tl.load(address.to(tl.pointer_type(tl.float32)) + places, mask=mask, other=0.0)
    else:
        stored = tl.load(address.to(tl.pointer_type(tl.int16)) + places, mask=mask, other=0)
        if kind == _BFLOAT16:
            values = (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            values = stored.to(tl.float16, bitcast=True).to(tl.float32)
    return values


# The number of rows differs between steps: specialising on it would recompile while serving.
@triton.jit(do_not_specialize=["rows"])
def _down_kernel(
    x,
    norm,
    u,
    records,
    order,
    bounds,
    rows,
    width,
    x_stride,
    record_stride,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute some elements of u of a tile's rows, over a part of the depth."""
    own = bounds + tl.program_id(0) * 3
    begin, end, adapter = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    split = tl.program_id(2)
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    if begin < end:
        record = records + adapter * record_stride
        ranks = tl.load(record + 2)
        if tl.program_id(1) * RANKS < ranks:
            place = begin + tl.arange(0, TILE)
            real = place < end
            row = tl.load(order + place, mask=real, other=0).to(tl.int64)
            down, kind = tl.load(record), tl.load(record + 3)
            known = rank < ranks
            depth = split * SPAN + tl.arange(0, DEPTH)
            total = tl.zeros((TILE, RANKS), tl.float32)
            for start in range(0, SPAN, DEPTH):
                at = depth + start
                inside = at < SIZE
                places = (row * x_stride)[:, None] + at[None, :]
                wanted = real[:, None] & inside[None, :]
                values = tl.load(x + places, mask=wanted, other=0.0).to(tl.float32)
                if NORM:
                    factor = 1.0 + tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
                    values = (values * factor[None, :]).to(x.dtype.element_ty).to(tl.float32)
                places = rank[None, :] * SIZE + at[:, None]
                part = _factor(down, places, known[None, :] & inside[:, None], kind)
                total = tl.dot(values, part, total, input_precision=PRECISION)
            scales = tl.load(record + 1).to(tl.pointer_type(tl.float32))
            total *= tl.load(scales + rank, mask=known, other=0.0)[None, :]
            places = (split * rows + row)[:, None] * width + rank[None, :]
            tl.store(u + places, total, mask=real[:, None] & known[None, :])


@triton.jit
def low_rank_change(
    record,
    u,
    row,
    real,
    columns,
    rows,
    width,
    LOW_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return an adapter's addition to some columns of rows.

    Args:
        record: pointer to the adapter's record.
        u: pointer to float32 `[splits, rows, width]`.
        row: `[ROWS]`, where `real`.
        columns: int32 `[COLUMNS]`, adjacent ones.
        LOW_RANK: `sizes_of(u)`.

    Returns:
        float32 `[ROWS, COLUMNS]`.
    """
    COLUMNS: tl.constexpr = columns.shape[0]
    SPLITS: tl.constexpr = LOW_RANK[0]
    PARTS: tl.constexpr = LOW_RANK[1]
    RANKS: tl.constexpr = LOW_RANK[2]
    first = tl.min(columns, axis=0)
    total = tl.zeros((row.shape[0], COLUMNS), tl.float32)
    split = tl.arange(0, PARTS)
    for number in range(tl.load(record + 4)):
        part = record + _HEAD + number * _PART
        begin, end = tl.load(part).to(tl.int32), tl.load(part + 1).to(tl.int32)
        if (begin < first + COLUMNS) & (end > first):
            offset, ranks = tl.load(part + 2).to(tl.int32), tl.load(part + 3).to(tl.int32)
            up, kind = tl.load(part + 4), tl.load(part + 5)
            inside = (columns >= begin) & (columns < end)
            for start in tl.range(0, ranks, RANKS, num_stages=1):
                rank = start + tl.arange(0, RANKS)
                known = rank < ranks
                summed = (split[:, None, None] * rows + row[None, :, None]) * width
                summed += (offset + rank)[None, None, :]
                wanted = real[:, None] & known[None, :]
                wanted = wanted[None, :, :] & (split < SPLITS)[:, None, None]
                own = tl.sum(tl.load(u + summed, mask=wanted, other=0.0), axis=0)
                places = ((columns - begin) * ranks)[None, :] + rank[:, None]
                values = _factor(up, places, known[:, None] & inside[None, :], kind)
                total = tl.dot(own, values, total, input_precision=PRECISION)
    return total


@triton.jit
def few_changed(
    total, changes, index, rows, columns, LOW_RANK: tl.constexpr, PRECISION: tl.constexpr
):
    """Return sums of a few rows with the changes of their adapters.

    Args:
        total: float32 `[ROWS, COLUMNS]`.
        changes: `Changes`.
        index: `[ROWS]`; rows count below `rows`.
        columns: adjacent ones.
        LOW_RANK: `sizes_of(u)`.
    """
    ROWS: tl.constexpr = index.shape[0]
    of_rows = tl.load(changes.adapters + index, mask=index < rows, other=-1)
    for each in range(rows):
        adapter = tl.load(changes.adapters + each)
        mine = of_rows == adapter
        # Once for all rows of an adapter.
        if (adapter >= 0) & (tl.min(tl.where(mine, index, ROWS), axis=0) == each):
            total = _changed(
                total, changes, adapter, mine, index, rows, columns, LOW_RANK, PRECISION
            )
    return total


@triton.jit
def tile_changed(
    total,
    changes,
    of_rows,
    row,
    rows,
    columns,
    adapters,
    LOW_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return sums of a tile of many rows with the changes of their adapters; see `few_changed`.

    Args:
        of_rows: `[ROWS]`, the number of each row's adapter, below `adapters`, or -1.
    """
    for adapter in range(adapters):
        mine = of_rows == adapter
        if tl.max(mine.to(tl.int32), axis=0) > 0:
            total = _changed(total, changes, adapter, mine, row, rows, columns, LOW_RANK, PRECISION)
    return total


@triton.jit
def _changed(
    total,
    changes,
    adapter,
    mine,
    row,
    rows,
    columns,
    LOW_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return sums with the change of one adapter, in the rows that have it."""
    record = changes.records + adapter * changes.record_stride
    if tl.load(record + 2) > 0:
        added = low_rank_change(
            record, changes.u, row, mine, columns, rows, changes.width, LOW_RANK, PRECISION
        )
        total = tl.where(mine[:, None], total + added, total)
    return total


@triton.jit
def finished(total, times, plus, row, columns, mask, ACTIVATION: tl.constexpr):
    """Return sums with what follows them, in float32.

    Args:
        total: float32 `[ROWS, COLUMNS]`.
        times, plus: `Rows` or None.
        row: int64 `[ROWS]`, in `times` and `plus`.
        columns: int32 `[COLUMNS]`.
        mask: `[ROWS, COLUMNS]`, of what counts.
        ACTIVATION: a number of `ACTIVATIONS`.
    """
    if ACTIVATION == 1:
        total = total / (1.0 + tl.exp(-total))
    elif ACTIVATION == 2:
        total = total * 0.5 * (1.0 + tl.erf(total * 0.7071067811865476))
    elif ACTIVATION == 3:
        bent = 0.7978845608028654 * (total + 0.044715 * total * total * total)
        # 1 + tanh(bent)
        total = total * 0.5 * (2.0 - 2.0 / (1.0 + tl.exp(2.0 * bent)))
    elif ACTIVATION == 4:
        total = tl.where(total < 0.0, 0.0, total * total)
    if times is not None:
        places = times.at + (row * times.stride)[:, None] + columns[None, :]
        total *= tl.load(places, mask=mask, other=0.0).to(tl.float32)
    if plus is not None:
        places = plus.at + (row * plus.stride)[:, None] + columns[None, :]
        total += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rows"])
def _up_kernel(
    sums,
    times,
    plus,
    out,
    u,
    records,
    order,
    bounds,
    rows,
    width,
    record_stride,
    WIDE: tl.constexpr,
    LOW_RANK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute some columns of a tile's rows: sums, the adapter's addition, and the epilogue."""
    own = bounds + tl.program_id(0) * 3
    begin, end, adapter = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    if begin < end:
        record = records + adapter * record_stride
        if tl.load(record + 2) > 0:
            place = begin + tl.arange(0, TILE)
            real = place < end
            row = tl.load(order + place, mask=real, other=0).to(tl.int64)
            columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            mask = real[:, None] & (columns < WIDE)[None, :]
            added = low_rank_change(record, u, row, real, columns, rows, width, LOW_RANK, PRECISION)
            places = sums.at + (row * sums.stride)[:, None] + columns[None, :]
            total = tl.load(places, mask=mask, other=0.0) + added
            total = finished(total, times, plus, row, columns, mask, ACTIVATION)
            places = out.at + (row * out.stride)[:, None] + columns[None, :]
            tl.store(places, total.to(out.at.dtype.element_ty), mask=mask)


def reduced(x: torch.Tensor, norm: torch.Tensor | None, site: Site) -> Reduced:
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, size = x.shape
    splits, width = triton.cdiv(size, SPAN), RANKS * triton.cdiv(site.width, RANKS)
    u = torch.empty(splits, rows, width, dtype=torch.float32, device=x.device)
    arguments = {
        "x": x,
        "norm": x if norm is None else norm,
        "u": u,
        **_tables(site),
        "rows": rows,
        "width": width,
        "x_stride": x.stride(0),
        "SIZE": size,
        "NORM": norm is not None,
        "SPAN": min(SPAN, DEPTH * triton.cdiv(size, DEPTH)),
        "TILE": TILE,
        "RANKS": RANKS,
        "DEPTH": DEPTH,
        "PRECISION": current_target().dot_precision,
    }
    grid = (len(site.groups.bounds), width // RANKS, splits)
    launch(_down_kernel, grid, arguments, num_warps=4)
    return Reduced(u, site)


def extended(out: torch.Tensor, sums: torch.Tensor, after: Epilogue, change: Reduced) -> None:
    arguments = {
        "sums": rows_of(sums),
        "times": None if after.times is None else rows_of(after.times),
        "plus": None if after.plus is None else rows_of(after.plus),
        "out": rows_of(out),
        "u": change.u,
        **_tables(change.site),
        "rows": change.u.shape[1],
        "width": change.u.shape[2],
        "WIDE": out.shape[1],
        "LOW_RANK": sizes_of(change.u),
        "ACTIVATION": ACTIVATIONS[after.activation],
        "TILE": TILE,
        "COLUMNS": COLUMNS,
        "PRECISION": current_target().dot_precision,
    }
    grid = (len(change.site.groups.bounds), triton.cdiv(out.shape[1], COLUMNS))
    launch(_up_kernel, grid, arguments, num_warps=4)


def _tables(site: Site) -> dict[str, Any]:
    groups, records = site.groups, site.records
    return {
        "records": records,
        "order": groups.order,
        "bounds": groups.bounds,
        "record_stride": records.stride(0),
    }


def changes_of(change: Reduced) -> Changes:
    """Return what kernels of rows in the order of a step take."""
    u, (groups, records, _) = change
    return Changes(u, records, groups.adapters, u.shape[2], records.stride(0))


def sizes_of(u: torch.Tensor) -> tuple[int, int, int]:
    """Return the constants of `low_rank_change`: splits, as many rounded up to a power of two, and
    the elements of u that a step multiplies."""
    return len(u), power_of_two(len(u)), RANKS
