"""Products of a few rows with quantised weights on a GPU, in one launch; codes of `stored_codes`.

At one row the rate of memory is the limit. So a thread reads 16 bytes of codes at a time and
multiplies in float32 without tensor cores; a step takes several groups. Each column's depth is in
parts, one for each lane of a warp. A lane adds its units of up to 16 bytes in ascending order,
each times its scale. The sums of lanes are added last, in an order that their number fixes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.kv_quant.triton import decode_float8
from vlm_serve.kernels.linear.codes_triton import (
    FLOAT4,
    FLOAT8_NATIVE,
    INT4,
    INT6,
    INT8,
    NUMBERS,
    code_arguments,
    half_value,
    scale_value,
)
from vlm_serve.kernels.linear.few_rows import MOST_ROWS, Around
from vlm_serve.kernels.linear.stored_codes import Stored
from vlm_serve.kernels.triton_support import current_target, launch, power_of_two
from vlm_serve.kernels.triton_views import rows as rows_of
from vlm_serve.kernels.tuning import NARROW_BELOW, tuned

WIDEST = 16
"""Bytes of codes that a thread reads at a time."""


class FewCodesTile(NamedTuple):
    """Columns of a program, parts of the depth, warps, and steps in flight."""

    columns: int
    lanes: int
    warps: int
    stages: int


def tile_of(dtype: torch.dtype, columns: int) -> FewCodesTile:
    """Return the tile; the number of rows has no part in it."""
    narrow, target = columns < NARROW_BELOW, current_target()
    if target.backend == "hip":
        # What is not copied ahead stays in registers: eight rows with more columns would spill.
        return FewCodesTile(8, 32, 4, 1)
    if dtype == torch.float32:
        return FewCodesTile(8, 32, 4, 3)
    usual = FewCodesTile(8 if narrow else 16, 32, 4, 4)
    op = "few rows of codes, narrow" if narrow else "few rows of codes"
    return FewCodesTile(**tuned(op, target, usual._asdict(), _shared_bytes))


def _shared_bytes(tile: Mapping[str, int]) -> int:
    """Return the shared memory of codes and of 16-bit rows in flight."""
    of_rows = 2 * 2 * MOST_ROWS
    return tile["stages"] * tile["lanes"] * WIDEST * (tile["columns"] + of_rows)


@triton.jit
def _code_value(codes, zero, FORM: tl.constexpr):
    """Return the float32 values, before scales, of codes."""
    if FORM == FLOAT8_NATIVE:
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    elif FORM < INT8:
        value = decode_float8(codes).to(tl.float32)
    elif FORM == FLOAT4:
        value = half_value(codes, zero, FORM)
    else:
        # From 2^23 on float32 has whole numbers alone: a code is the last bits of one, and the
        # difference is exact. That takes fewer cycles than a conversion.
        raised = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
        value = raised - (zero + 8388608.0)
    return value


@triton.jit
def _add_products(totals, x, places, wanted, rows, value, scale, ROWS: tl.constexpr):
    """Add each row's products with units of codes, `[COLUMNS, LANES, 1]` a row."""
    sums = ()
    for row in tl.static_range(ROWS):
        own = tl.load(x.at + row * x.stride + places, mask=wanted & (row < rows), other=0.0)
        part = tl.sum(own.to(tl.float32) * value, axis=2, keep_dims=True)
        sums = sums + (tl.fma(part, scale, totals[row]),)  # type: ignore[assignment]
    return sums


@triton.jit
def _load_scales(weight, column, unit, wanted, PER_GROUP: tl.constexpr, ZEROS: tl.constexpr):
    """Return the scales and zero points of units as they are in memory."""
    at = column * weight.scale_stride + unit // PER_GROUP
    scale = tl.load(weight.scales + at, mask=wanted, other=0)
    zero = scale
    if ZEROS:
        zero = tl.load(weight.zeros + at, mask=wanted, other=0)
    return scale, zero


# The number of rows differs between steps; ROWS, a power of two, is what it is compiled for.
@triton.jit(do_not_specialize=["rows"])
def _few_codes_kernel(
    x,
    weight,
    bias,
    plus,
    out,
    rows,
    LAYOUT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    SHARE: tl.constexpr,
    STAGES: tl.constexpr,
):
    GROUP: tl.constexpr = LAYOUT.group
    FORM: tl.constexpr = LAYOUT.form
    ZEROS: tl.constexpr = LAYOUT.zeros
    SCALES: tl.constexpr = LAYOUT.scales
    # As in `grouped_product`: byte j of a group has four bits of the codes of j and j + SPAN.
    HALVES: tl.constexpr = FORM >= INT4
    SPAN: tl.constexpr = GROUP // 2 if HALVES else GROUP
    PER_GROUP: tl.constexpr = SPAN // SHARE
    UNITS: tl.constexpr = DEPTH // SHARE // 2 if HALVES else DEPTH // SHARE
    OWN: tl.constexpr = COLUMNS // 2 if GATED else COLUMNS
    first = tl.program_id(0) * OWN
    index = tl.arange(0, COLUMNS)
    # Gated, columns of `gate` come first and those of `up` WIDTH rows of codes behind them.
    own = first + index % OWN
    inside = own < WIDTH
    column = (own + index // OWN * WIDTH).to(tl.int64)[:, None, None]
    real = inside[:, None, None]
    lane = tl.arange(0, LANES)[None, :, None]
    byte = tl.arange(0, SHARE)[None, None, :]
    middle = 128.0 if FORM == INT8 else 32.0 if FORM == INT6 else 8.0
    totals = ()
    for _ in tl.static_range(ROWS):
        totals = totals + (tl.zeros((COLUMNS, LANES, 1), tl.float32),)  # type: ignore[assignment]
    # Scales are small and lie apart, so no copy fetches them: a step loads those of the next one.
    ahead = _load_scales(weight, column, lane, (lane < UNITS) & real, PER_GROUP, ZEROS)
    for begin in tl.range(0, UNITS, LANES, num_stages=STAGES):
        unit = begin + lane
        known = unit < UNITS
        both = known & real
        group = unit // PER_GROUP
        within = (unit - group * PER_GROUP) * SHARE
        scale = scale_value(ahead[0], SCALES)
        zero = middle
        if ZEROS:
            zero = ahead[1].to(tl.float32)
        after = unit + LANES
        ahead = _load_scales(weight, column, after, (after < UNITS) & real, PER_GROUP, ZEROS)
        place = unit * SHARE
        if FORM == INT6:
            place = group * (GROUP // 4 * 3) + within
        line = weight.codes + column * weight.code_stride
        stored = tl.load(line + (place + byte), mask=both, other=0)
        k = unit * SHARE + byte
        if HALVES:
            k = group * GROUP + within + byte
            low, high = stored & 15, stored >> 4
            if FORM == INT6:
                # Behind those bytes: two bits of the codes of j, j + GROUP / 4 and so on.
                quarter = within // (SPAN // 2)
                place += SPAN - quarter * (SPAN // 2)
                tops = tl.load(line + (place + byte), mask=both, other=0)
                tops = tops >> (2 * quarter).to(tl.uint8)
                low, high = low | ((tops & 3) << 4), high | (tops & 48)
            value = _code_value(high, zero, FORM)
            totals = _add_products(totals, x, k + SPAN, known, rows, value, scale, ROWS)
            stored = low
        value = _code_value(stored, zero, FORM)
        totals = _add_products(totals, x, k, known, rows, value, scale, ROWS)
    factor = 1.0
    if SCALES != NUMBERS:
        factor = tl.load(weight.factors + (own + index // OWN * WIDTH), mask=inside, other=0.0)
    offset = 0.0
    if bias is not None:
        offset = tl.load(bias + (own + index // OWN * WIDTH), mask=inside, other=0.0)
    results = first + tl.arange(0, OWN)
    for row in tl.static_range(ROWS):
        # Lanes in a tree, which their number fixes.
        total = tl.sum(tl.sum(totals[row], axis=2), axis=1) * factor + offset
        if GATED:
            # Rounded before the activation, as where both products have results of their own.
            gate, up = tl.split(tl.trans(tl.reshape(total, (2, OWN))))
            gate = gate.to(x.at.dtype.element_ty).to(tl.float32)
            total = up.to(x.at.dtype.element_ty).to(tl.float32) * gate / (1.0 + tl.exp(-gate))
        mask = (results < WIDTH) & (row < rows)
        if plus is not None:
            added = tl.load(plus.at + row * plus.stride + results, mask=mask, other=0.0)
            total += added.to(tl.float32)
        place = out.at + row * out.stride + results
        tl.store(place, total.to(out.at.dtype.element_ty), mask=mask)


def few_codes(
    x: torch.Tensor, weight: Stored, bias: torch.Tensor | None, around: Around, out: torch.dtype
) -> torch.Tensor:
    rows, depth = x.shape
    if rows > MOST_ROWS:
        raise KernelArgumentError("x", f"{rows} rows, at most {MOST_ROWS}")
    if around.norm is not None:
        raise KernelArgumentError("around", "the norm of rows comes before codes, apart")
    x = x if x.stride(1) == 1 else x.contiguous()
    wide, plus = weight.codes.shape[0], around.plus
    width = wide // 2 if around.gated else wide
    if plus is not None and around.overwrite and plus.dtype == out:
        result = plus
    else:
        result = torch.empty(rows, width, dtype=out, device=x.device)
    tile = tile_of(x.dtype, wide)
    columns = max(2, tile.columns) if around.gated else tile.columns
    operands = code_arguments(weight, x, current_target())
    layout = operands["LAYOUT"]
    arguments = {
        **operands,
        "x": rows_of(x),
        "bias": bias,
        "plus": None if plus is None else rows_of(plus),
        "out": rows_of(result),
        "rows": rows,
        "WIDTH": width,
        "DEPTH": depth,
        "GATED": around.gated,
        "ROWS": power_of_two(rows),
        "COLUMNS": columns,
        "LANES": tile.lanes,
        "SHARE": _share_of(int(layout.group), int(layout.form), depth),
        "STAGES": tile.stages,
    }
    grid = (triton.cdiv(width, columns // 2 if around.gated else columns),)
    launch(_few_codes_kernel, grid, arguments, num_warps=tile.warps, num_stages=tile.stages)
    return result


def _share_of(group: int, form: int, depth: int) -> int:
    """Return the bytes that a thread reads at a time: they have one scale, and fill the depth."""
    if form == INT6.value:
        size = group // 4
    elif form >= INT4.value:
        size = group // 2
    else:
        # A last block of float8 may be partial.
        size = math.gcd(group, depth)
    return math.gcd(size, WIDEST)
