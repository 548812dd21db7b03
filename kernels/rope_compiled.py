"""Query/key norm and partial rotation, compiled CPU path."""

from __future__ import annotations

import ctypes

import torch

from vlm_serve.kernels.native import load
from vlm_serve.kernels.native_records import address, bits, knows_rows, rows
from vlm_serve.kernels.norms_compiled import centred

_MOST_DIM = 256


def knows(x: torch.Tensor) -> bool:
    """Whether `norm_rope` is for such heads."""
    return knows_rows(x) and x.shape[2] <= _MOST_DIM


def norm_rope(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """Norm and rotation of all heads; `cos` and `sin` are contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype)
    load().vlm_norm_rope(
        ctypes.byref(rows(x, out)),
        address(centred(weight)),
        address(cos),
        address(sin),
        ctypes.c_int64(cos.shape[1]),
        ctypes.c_double(eps),
        bits(x),
    )
    return out
