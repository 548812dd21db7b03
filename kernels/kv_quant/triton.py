"""Stored forms of keys and values inside Triton kernels; the formats are those of `kv_quant`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.metadata import KVLayer
from vlm_serve.kernels.triton_support import Target

# Form of a kernel's pages.
PLAIN = tl.constexpr(0)
FLOAT8_NATIVE = tl.constexpr(1)
FLOAT8_INTEGER = tl.constexpr(2)
INT8 = tl.constexpr(3)


def stored_form(kv: KVLayer, target: Target) -> int:
    """Return the constant above for a layer's pages on a target."""
    if kv.k.dtype == torch.uint8:
        return int(INT8.value)
    if kv.k.dtype == torch.float8_e4m3fn:
        return int(FLOAT8_NATIVE.value if target.native_float8 else FLOAT8_INTEGER.value)
    return int(PLAIN.value)


def page_arguments(kv: KVLayer) -> dict[str, torch.Tensor | int]:
    """Return a layer's pages as kernel arguments; float8 as bytes: not all targets support it.

    Raises:
        KernelArgumentError: keys and values, or the four scale tensors, differ in strides.
    """
    if kv.v.stride() != kv.k.stride():
        raise KernelArgumentError("kv.v", "strides differ from those of kv.k")
    k, v = kv.k, kv.v
    if k.dtype == torch.float8_e4m3fn:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    arguments: dict[str, torch.Tensor | int] = {
        "k_pages": k,
        "v_pages": v,
        "page_block_stride": k.stride(0),
        "page_slot_stride": k.stride(1),
        "page_head_stride": k.stride(2),
        "block_size": k.shape[1],
    }
    # Plain pages have no scales; any pointer takes their place and is never read.
    scales = (kv.k_scale, kv.k_zero, kv.v_scale, kv.v_zero)
    first = kv.k_scale if kv.k_scale is not None else k
    for name, scale in zip(("k_scale", "k_zero", "v_scale", "v_zero"), scales, strict=True):
        if scale is not None and scale.stride() != first.stride():
            raise KernelArgumentError(f"kv.{name}", "strides differ from those of kv.k_scale")
        arguments[f"{name}s"] = first if scale is None else scale
    quantised = kv.k_scale is not None
    arguments["scale_block_stride"] = first.stride(0) if quantised else 0
    arguments["scale_slot_stride"] = first.stride(1) if quantised else 0
    arguments["scale_head_stride"] = first.stride(2) if quantised else 0
    return arguments


@triton.jit
def encode_float8(x):
    """Convert float32 to float8_e4m3fn codes: saturating, round to nearest even.

    Integer arithmetic gives the same bits on every target.
    """
    x = tl.where(x > 448.0, 448.0, x)
    x = tl.where(x < -448.0, -448.0, x)
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Drop 20 of 23 mantissa bits with rounding, then move the exponent's bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Below 2**-6 codes count multiples of 2**-9, which is the spacing of floats at 2**14.
    size = magnitude.to(tl.float32, bitcast=True)
    tiny = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, tiny, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_float8(codes):
    """Convert float8_e4m3fn codes to float16, exactly, by integer arithmetic."""
    wide = codes.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = half.to(tl.float16, bitcast=True) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def decode_stored(pages, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """Convert loaded page contents to the dtype of a dot's operands.

    int8 codes stay without their zero point and scale.
    """
    if FORM == FLOAT8_NATIVE:
        return pages.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(DTYPE)
    elif FORM == FLOAT8_INTEGER:
        return decode_float8(pages).to(DTYPE)
    else:
        return pages.to(DTYPE)


@triton.jit
def quantise_rows(x):
    """Quantise float32 `[R, D]` to uint8 codes `[R, D]`, float16 scale `[R]` and zero point `[R]`.

    Divisions are rounded and ties go to even, as in `kv_quant.quantise`.
    """
    low = tl.minimum(tl.min(x, axis=1), 0.0)
    spread = tl.maximum(tl.max(x, axis=1), 0.0) - low
    exact = tl.math.div_rn(spread, tl.full(spread.shape, 255.0, tl.float32))
    scale = exact.to(tl.float16)
    above = (scale.to(tl.int16, bitcast=True) + 1).to(tl.int16).to(tl.float16, bitcast=True)
    scale = tl.where(scale.to(tl.float32) < exact, above, scale)
    divisor = tl.where(scale > 0, scale.to(tl.float32), 1.0)
    one = tl.full(spread.shape, 1.0, tl.float32)
    inverse = tl.where(scale > 0, tl.math.div_rn(one, divisor), 0.0)
    zero = round_half_even(-low * inverse)
    codes = round_half_even(x * inverse[:, None]) + zero[:, None]
    codes = tl.minimum(tl.maximum(codes, 0.0), 255.0).to(tl.int32).to(tl.uint8)
    return codes, scale, zero.to(tl.float16)


@triton.jit
def round_half_even(x):
    """Round |x| < 2**22 to whole numbers: adding 1.5 * 2**23 leaves no fraction bits."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def store_plain(pages, places, values, mask, FORM: tl.constexpr):
    """Store values in pages without scales: as they are, or as float8 codes."""
    if FORM == PLAIN:
        tl.store(pages + places, values.to(pages.dtype.element_ty), mask=mask)
    else:
        tl.store(pages + places, encode_float8(values.to(tl.float32)), mask=mask)
