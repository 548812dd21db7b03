"""Products with sigmoid and SiLU, compiled CPU path."""

from __future__ import annotations

import ctypes

import torch

from vlm_serve.kernels.native_library import call
from vlm_serve.kernels.native_records import bits, knows_rows, rows


def knows_times_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> bool:
    """Whether `times_sigmoid` is for such inputs."""
    same = x.shape == gate.shape and x.dtype == gate.dtype
    return same and knows_rows(x) and knows_rows(gate)


def times_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    call("vlm_times_sigmoid", ctypes.byref(rows(x, out)), ctypes.byref(rows(gate)), bits(x))
    return out


def knows_silu_times(gate: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether `silu_times` is for such inputs."""
    return knows_times_sigmoid(x, gate)


def silu_times(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    call("vlm_silu_times", ctypes.byref(rows(gate)), ctypes.byref(rows(x, out)), bits(x))
    return out
