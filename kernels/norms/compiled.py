"""RMS norms, compiled CPU path."""

from __future__ import annotations

import ctypes

import torch

from vlm_serve.kernels.derived import derived
from vlm_serve.kernels.native_library import call
from vlm_serve.kernels.native_records import bits, knows_rows, rows


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
    if not knows_rows(x):
        return None
    out = torch.empty(x.shape, dtype=x.dtype)
    call("vlm_rms_norm", ctypes.byref(rows(x, out)), centred(weight).data_ptr(), eps, bits(x))
    return out


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    gate_first: bool = False,
    mean: torch.Tensor | None = None,
) -> torch.Tensor | None:
    if gate_first or not (knows_rows(x) and knows_rows(gate)):
        return None
    out = torch.empty(x.shape, dtype=x.dtype)
    factors = derived(weight, "factors", lambda w: w.float().contiguous())
    call(
        "vlm_gated_rms_norm",
        ctypes.byref(rows(x, out)),
        ctypes.byref(rows(gate)),
        factors.data_ptr(),
        eps,
        bits(x),
    )
    return out


def centred(weight: torch.Tensor) -> torch.Tensor:
    """Return the factors of a zero-centred norm, float32 `[D]`."""
    return derived(weight, "centred factors", lambda w: w.float() + 1.0)
