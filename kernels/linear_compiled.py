"""A projection of a few rows in compiled code, which reads packed weights at memory speed."""

from __future__ import annotations

import ctypes

import torch

from vlm_serve.kernels.native_library import load
from vlm_serve.kernels.native_records import bits, fields

MOST_ROWS = 64
"""As in `native/linear.h`."""

_PLAIN, _TIMES, _PLUS = range(3)


class WeightRecord(ctypes.Structure):
    """`Weight` of `native/linear.h`: a packed projection."""

    _fields_ = (
        *fields(ctypes.c_void_p, "packed", "bias"),
        *fields(ctypes.c_int64, "columns", "depth"),
    )


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
    load().vlm_linear(ctypes.byref(job), bits(x))
    return out
