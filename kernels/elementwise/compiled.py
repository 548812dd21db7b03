"""Products with sigmoid and SiLU, compiled CPU path."""

from __future__ import annotations

import ctypes

import torch

from vlm_serve.kernels.native_library import call
from vlm_serve.kernels.native_records import bits, knows_rows, rows


def times_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor | None:
    if not _alike(x, gate):
        return None
    out = torch.empty(x.shape, dtype=x.dtype)
    call("vlm_times_sigmoid", ctypes.byref(rows(x, out)), ctypes.byref(rows(gate)), bits(x))
    return out


def silu_times(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    if not _alike(x, gate):
        return None
    out = torch.empty(x.shape, dtype=x.dtype)
    call("vlm_silu_times", ctypes.byref(rows(gate)), ctypes.byref(rows(x, out)), bits(x))
    return out


def _alike(x: torch.Tensor, gate: torch.Tensor) -> bool:
    same = x.shape == gate.shape and x.dtype == gate.dtype
    return same and knows_rows(x) and knows_rows(gate)
