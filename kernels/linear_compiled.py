"""A projection of a few rows in compiled code, which reads packed weights at memory speed."""

from __future__ import annotations

import ctypes

import torch

from vlm_serve.kernels.native_layout import constant, mirrors
from vlm_serve.kernels.native_library import call
from vlm_serve.kernels.native_records import bits, fields

MOST_ROWS = constant("MOST_PRODUCT_ROWS", 64)

_PLAIN, _TIMES, _PLUS = constant("PLAIN", 0), constant("TIMES", 1), constant("PLUS", 2)


@mirrors("Weight")
class WeightRecord(ctypes.Structure):
    """`Weight` of `native/linear.h`: a packed projection."""

    _fields_ = (
        *fields(ctypes.c_void_p, "packed", "bias"),
        *fields(ctypes.c_int64, "columns", "depth"),
    )


@mirrors("Projection")
class _Projection(ctypes.Structure):
    _fields_ = (
        ("weight", WeightRecord),
        *fields(ctypes.c_int64, "rows", "x_stride", "other_stride", "use", "threads"),
        *fields(ctypes.c_void_p, "x", "other", "out"),
    )


def project(
    x: torch.Tensor,
    weight: WeightRecord,
    *,
    times: torch.Tensor | None = None,
    plus: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `linear.linear`, for up to MOST_ROWS rows as wide as the weight is deep."""
    out = x.new_empty(x.shape[0], weight.columns)
    use = _TIMES if times is not None else _PLUS if plus is not None else _PLAIN
    other = plus if times is None else times
    job = _Projection(
        weight=weight,
        rows=x.shape[0],
        x_stride=x.stride(0),
        other_stride=0 if other is None else other.stride(0),
        use=use,
        threads=torch.get_num_threads(),
        x=x.data_ptr(),
        other=None if other is None else other.data_ptr(),
        out=out.data_ptr(),
    )
    call("vlm_linear", ctypes.byref(job), bits(x))
    return out
