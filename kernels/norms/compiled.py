"""RMS norms, compiled CPU path."""

from __future__ import annotations

import ctypes

import torch

from vlm_serve.kernels.derived import derived
from vlm_serve.kernels.native_library import call
from vlm_serve.kernels.native_records import bits, knows_rows, rows


def knows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> bool:
    """Whether `rms_norm` is for such inputs."""
    return knows_rows(x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    call("vlm_rms_norm", ctypes.byref(rows(x, out)), centred(weight).data_ptr(), eps, bits(x))
    return out


def knows_gated(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> bool:
    """Whether `gated_rms_norm` is for such inputs."""
    return knows_rows(x) and knows_rows(gate)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
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
    """The factors of a zero-centred norm, float32."""
    return derived(weight, "centred factors", lambda w: w.float() + 1.0)
