"""Sigmoid and SiLU whose bits depend on the element alone.

torch's own run the last elements of each thread's share of a tensor through a scalar path that
differs from the vector path in the last bit; so an element's bits depend on the size of its batch
and on the number of threads. `exp`, `log1p` and exact operations do not (measured with torch 2.13
on 1 to 8 threads), and cost no more. Everything is float32 inside.
"""

from __future__ import annotations

import ctypes

import torch

from vlm_serve.kernels.dispatch import compiled_wanted
from vlm_serve.kernels.native import load
from vlm_serve.kernels.native_records import bits, knows_rows, rows


def silu(x: torch.Tensor) -> torch.Tensor:
    """`x * sigmoid(x)`, in the dtype of x."""
    return times_sigmoid(x, x)


def times_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`x * sigmoid(gate)` in the dtype of x; the gate's shape broadcasts to that of x."""
    same = x.shape == gate.shape and x.dtype == gate.dtype
    if compiled_wanted() and same and all(map(knows_rows, (x, gate))):
        out = torch.empty(x.shape, dtype=x.dtype)
        load().vlm_times_sigmoid(ctypes.byref(rows(x, out)), ctypes.byref(rows(gate)), bits(x))
        return out
    denominator = torch.neg(gate.float()).exp_().add_(1)
    if x.dtype == torch.float32 and denominator.shape == x.shape:
        return torch.div(x, denominator, out=denominator)
    return (x / denominator).to(x.dtype)


def silu_times(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * x` in their dtype, float32 inside; `[T, width]` of compiled code's rows."""
    out = torch.empty(x.shape, dtype=x.dtype)
    load().vlm_silu_times(ctypes.byref(rows(gate)), ctypes.byref(rows(x, out)), bits(x))
    return out


def softplus(x: torch.Tensor) -> torch.Tensor:
    """`log(1 + exp(x))` without overflow, float32."""
    x = x.float()
    return torch.abs(x).neg_().exp_().log1p_().add_(x.clamp(min=0))
