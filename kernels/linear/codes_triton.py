"""Products with quantised weights on a GPU; codes in the layout of `stored_codes`.

A group's codes, less their zero point, are whole numbers (or float8) and exact in bfloat16 and
float16. So a group is one chain of products with the unscaled activations, in float32. One product
with its scale then folds it into the row's sum; nothing else is rounded. Beside scales of one byte,
the final sum is multiplied by its column's factor.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.kv_quant.triton import decode_float8
from vlm_serve.kernels.linear.stored_codes import Stored
from vlm_serve.kernels.triton_support import Target, current_target, launch, power_of_two
from vlm_serve.kernels.triton_views import constants, dots
from vlm_serve.kernels.triton_views import rows as rows_of

# Form of the codes; those packed in halves of bytes come last.
FLOAT8_NATIVE = tl.constexpr(1)
FLOAT8_INTEGER = tl.constexpr(2)
INT8 = tl.constexpr(3)
INT4 = tl.constexpr(4)
FLOAT4 = tl.constexpr(5)
INT6 = tl.constexpr(6)

# Form of the scales.
NUMBERS = tl.constexpr(0)
ROOTS = tl.constexpr(1)
E4M3 = tl.constexpr(2)
E8M0 = tl.constexpr(3)


class Codes(NamedTuple):
    """A quantised weight with its strides; a missing tensor is any other, and is never read."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    factors: torch.Tensor
    code_stride: int
    scale_stride: int


class CodesLayout(NamedTuple):
    """Constants of codes: see `stored_codes`, the forms above, and the depth of a step."""

    group: int
    form: int
    zeros: bool
    scales: int
    step: int


@triton.jit
def half_value(codes, zero, FORM: tl.constexpr):
    """Return the float32 values, before scales, of codes of up to 6 bits."""
    if FORM == FLOAT4:
        # Twice the number: 0 and 1 below 2, and from there on 2 or 3 times a power of two.
        size = codes & 7
        large = ((size & 1) + 2).to(tl.int32) << (tl.maximum(size >> 1, 1) - 1).to(tl.int32)
        whole = tl.where(size < 2, size.to(tl.int32), large)
        value = tl.where(codes < 8, whole, -whole).to(tl.float32)
    else:
        value = codes.to(tl.float32) - zero
    return value


@triton.jit
def scale_value(stored, SCALES: tl.constexpr):
    """Return the float32 values of scales, without their factors."""
    if SCALES == E4M3:
        scale = decode_float8(stored).to(tl.float32)
    elif SCALES == E8M0:
        bits = tl.maximum(stored.to(tl.int32) << 23, 0x00400000)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = stored.to(tl.float32)
        if SCALES == ROOTS:
            scale *= tl.abs(scale)
    return scale


@triton.jit
def grouped_product(
    x_rows,
    weight,
    columns,
    inside,
    DEPTH: tl.constexpr,
    LAYOUT: tl.constexpr,
    DOT: tl.constexpr,
):
    """Multiply rows of x by columns of a quantised weight.

    Args:
        x_rows: pointer to the activations, offsets of the rows `[ROWS]`, and where they count.
        weight, LAYOUT: of `code_arguments`.
        columns: int64 `[COLUMNS]`; columns count where `inside`.

    Returns:
        float32 `[ROWS, COLUMNS]`.
    """
    x, x_places, real = x_rows
    codes, code_stride = weight.codes, weight.code_stride
    DTYPE: tl.constexpr = DOT.dtype
    PRECISION: tl.constexpr = DOT.precision
    GROUP: tl.constexpr = LAYOUT.group
    FORM: tl.constexpr = LAYOUT.form
    SCALES: tl.constexpr = LAYOUT.scales
    STEP: tl.constexpr = LAYOUT.step
    ROWS: tl.constexpr = real.shape[0]
    COLUMNS: tl.constexpr = columns.shape[0]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    own = tl.arange(0, STEP)
    # Byte j of a group has four bits of the codes of j and of j + GROUP / 2. Behind those bytes of
    # 6-bit codes, byte j has two bits of the codes of j, j + GROUP / 4 and so on.
    HALVES: tl.constexpr = FORM >= INT4
    SPAN: tl.constexpr = GROUP // 2 if HALVES else GROUP
    BYTES: tl.constexpr = GROUP // 4 * 3 if FORM == INT6 else SPAN
    middle = 128.0 if FORM == INT8 else 32.0 if FORM == INT6 else 8.0
    for group in range(0, (DEPTH + GROUP - 1) // GROUP):
        at_scale = columns * weight.scale_stride + group
        scale = scale_value(tl.load(weight.scales + at_scale, mask=inside, other=0), SCALES)
        zero = tl.zeros((COLUMNS,), tl.float32) + middle
        if LAYOUT.zeros:
            zero = tl.load(weight.zeros + at_scale, mask=inside, other=0).to(tl.float32)
        part = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, SPAN, STEP):
            # The last block of float8 may be partial.
            k = group * GROUP + start + own
            known = (start + own < SPAN) & (k < DEPTH)
            places = (columns * code_stride)[None, :] + (group * BYTES + start + own)[:, None]
            both = known[:, None] & inside[None, :]
            stored = tl.load(codes + places, mask=both, other=0)
            wanted = real[:, None] & known[None, :]
            rows = tl.load(x + x_places[:, None] + k[None, :], mask=wanted, other=0.0).to(DTYPE)
            if HALVES:
                low, high = stored & 15, stored >> 4
                if FORM == INT6:
                    quarter = (start + own) // (SPAN // 2)
                    at = group * BYTES + SPAN + start + own - quarter * (SPAN // 2)
                    places = (columns * code_stride)[None, :] + at[:, None]
                    tops = tl.load(codes + places, mask=both, other=0) >> (2 * quarter)[:, None]
                    low, high = low | ((tops & 3) << 4), high | (tops & 48)
                low = half_value(low, zero[None, :], FORM).to(DTYPE)
                part = tl.dot(rows, low, part, input_precision=PRECISION)
                k = k + SPAN
                rows = tl.load(x + x_places[:, None] + k[None, :], mask=wanted, other=0.0).to(DTYPE)
                high = half_value(high, zero[None, :], FORM).to(DTYPE)
                part = tl.dot(rows, high, part, input_precision=PRECISION)
            elif FORM == INT8:
                whole = (stored.to(tl.float32) - zero[None, :]).to(DTYPE)
                part = tl.dot(rows, whole, part, input_precision=PRECISION)
            elif FORM == FLOAT8_NATIVE:
                value = stored.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(DTYPE)
                part = tl.dot(rows, value, part, input_precision=PRECISION)
            else:
                part = tl.dot(
                    rows, decode_float8(stored).to(DTYPE), part, input_precision=PRECISION
                )
        total += part * scale[None, :]
    if SCALES != NUMBERS:
        total *= tl.load(weight.factors + columns, mask=inside, other=0.0)[None, :]
    return total


# The number of tokens differs between steps: specialising on it would recompile while serving.
@triton.jit(do_not_specialize=["tokens"])
def _linear_kernel(
    x,
    weight,
    bias,
    out,
    tokens,
    LAYOUT: tl.constexpr,
    DOT: tl.constexpr,
    WIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = row < tokens
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    inside = columns < WIDE
    rows = (x.at, row.to(tl.int64) * x.stride, real)
    total = grouped_product(rows, weight, columns, inside, DEPTH, LAYOUT, DOT)
    if bias is not None:
        total += tl.load(bias + columns, mask=inside, other=0.0)[None, :]
    places = row.to(tl.int64)[:, None] * WIDE + columns[None, :]
    mask = real[:, None] & inside[None, :]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=mask)


def product(
    x: torch.Tensor,
    weight: Stored,
    bias: torch.Tensor | None,
    out: torch.dtype,
    *,
    deterministic: bool,
) -> torch.Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, wide = x.shape[0], weight.codes.shape[0]
    result = torch.empty(tokens, wide, dtype=out, device=x.device)
    rows = 64 if deterministic or tokens > 32 else 32 if tokens > 16 else 16
    tile = {"ROWS": rows, "COLUMNS": 32 if x.dtype == torch.float32 else 64}
    arguments = {
        "x": rows_of(x),
        **code_arguments(weight, x, current_target()),
        "bias": bias,
        "out": result,
        "tokens": tokens,
        "DOT": dots(x.dtype),
        "WIDE": wide,
        "DEPTH": x.shape[1],
        **tile,
    }
    grid = (triton.cdiv(wide, tile["COLUMNS"]), triton.cdiv(tokens, rows))
    stages = 1 if x.dtype == torch.float32 else 3
    launch(_linear_kernel, grid, arguments, num_warps=4, num_stages=stages)
    return result


_FORMS = {4: INT4, 6: INT6, 8: INT8}
_KINDS = {torch.int8: ROOTS, torch.float8_e4m3fn: E4M3, torch.float8_e8m0fnu: E8M0}


def code_arguments(weight: Stored, x: torch.Tensor, target: Target) -> dict[str, Any]:
    """Return `Codes` and `CodesLayout` of a weight, by parameter name; float8 as bytes."""
    if weight.float8:
        form = FLOAT8_NATIVE if target.native_float8 else FLOAT8_INTEGER
    else:
        form = FLOAT4 if weight.float4 else _FORMS[weight.bits]
    span = weight.group // (2 if weight.bits < 8 else 1)
    scales, kind = weight.scales, _KINDS.get(weight.scales.dtype, NUMBERS)
    codes = weight.codes.view(torch.uint8)
    return {
        "weight": Codes(
            codes,
            scales.view(torch.uint8) if kind in (E4M3, E8M0) else scales,
            codes if weight.zeros is None else weight.zeros,
            scales if weight.factors is None else weight.factors,
            codes.stride(0),
            scales.stride(0),
        ),
        # A dot needs a depth of at least 16.
        "LAYOUT": constants(
            CodesLayout,
            weight.group,
            int(form.value),
            weight.zeros is not None,
            int(kind.value),
            min(32 if x.dtype == torch.float32 else 64, power_of_two(span, 16)),
        ),
    }
