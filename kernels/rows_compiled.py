"""Norms, rotation and gating in compiled code: arguments and results as in `norms_cpu`, `rope_cpu`
and `elementwise`, which call them."""

from __future__ import annotations

import ctypes

import torch

from vlm_serve.kernels.derived import derived
from vlm_serve.kernels.native import load

_LANES = 16
_MOST_DIM = 256
_DTYPES = (torch.float32, torch.bfloat16)


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "width")),
        *((name, ctypes.c_int64) for name in ("stride", "head_stride", "threads")),
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


def knows_rows(x: torch.Tensor) -> bool:
    """Whether these ops are for such rows: whole vectors, at most tokens and heads of them."""
    whole = x.shape[-1] % _LANES == 0 and x.stride(-1) == 1
    return whole and x.dtype in _DTYPES and x.ndim in (2, 3)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = _empty(x)
    factors = derived(weight, "centred factors", lambda w: w.float() + 1.0)
    load().vlm_rms_norm(
        _rows(x, out), _address(factors), ctypes.c_double(eps), ctypes.c_int64(8 * x.itemsize)
    )
    return out


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    out = _empty(x)
    factors = derived(weight, "factors", lambda w: w.float().contiguous())
    load().vlm_gated_rms_norm(
        _rows(x, out),
        _rows(gate),
        _address(factors),
        ctypes.c_double(eps),
        ctypes.c_int64(8 * x.itemsize),
    )
    return out


def times_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    out = _empty(x)
    load().vlm_times_sigmoid(_rows(x, out), _rows(gate), ctypes.c_int64(8 * x.itemsize))
    return out


def knows_rope(x: torch.Tensor) -> bool:
    """Whether `norm_rope` is for such heads."""
    return knows_rows(x) and x.ndim == 3 and x.shape[2] <= _MOST_DIM


def norm_rope(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    out = _empty(x)
    factors = derived(weight, "centred factors", lambda w: w.float() + 1.0)
    load().vlm_norm_rope(
        _rows(x, out),
        _address(factors),
        _address(cos),
        _address(sin),
        ctypes.c_int64(cos.shape[1]),
        ctypes.c_double(eps),
        ctypes.c_int64(8 * x.itemsize),
    )
    return out


def _empty(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


def _address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _rows(x: torch.Tensor, out: torch.Tensor | None = None) -> ctypes._CArgObject:
    heads, head_stride = (x.shape[1], x.stride(1)) if x.ndim == 3 else (1, 0)
    rows = _Rows(
        tokens=x.shape[0],
        heads=heads,
        width=x.shape[-1],
        stride=x.stride(0),
        head_stride=head_stride,
        threads=torch.get_num_threads(),
        x=x.data_ptr(),
        out=None if out is None else out.data_ptr(),
    )
    return ctypes.byref(rows)
