"""RMS norms, torch CPU path.

    x / sqrt(mean(x^2) + eps) = x * sqrt(D) * rsqrt(|x|^2 + eps * D)

saves a pass over x; the weight absorbs the factor sqrt(D). Rows are processed in blocks that stay
in the cache through all passes.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from vlm_serve.kernels.derived import derived

# Elements processed at a time.
BLOCK = 1 << 17


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    factor = centred_factor(weight)
    if x.numel() <= BLOCK:
        return unit_rows(x.float(), eps).mul_(factor).to(x.dtype)
    normed = torch.empty(x.shape, dtype=x.dtype)
    for part in blocks(x):
        torch.mul(unit_rows(x[part].float(), eps), factor, out=normed[part])
    return normed


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    factor = derived(weight, "gated norm", lambda w: w.float() * math.sqrt(w.shape[0]))
    if x.numel() <= BLOCK:
        return _gated(x, gate, factor, eps).to(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype)
    for part in blocks(x):
        out[part] = _gated(x[part], gate[part], factor, eps)
    return out


def _gated(x: torch.Tensor, gate: torch.Tensor, factor: torch.Tensor, eps: float) -> torch.Tensor:
    gate = gate.float()
    # F.silu would give bits that depend on the element's place; see elementwise.
    denominator = torch.neg(gate).exp_().add_(1)
    return unit_rows(x.float(), eps).mul_(factor).mul_(gate).div_(denominator)


def unit_rows(wide: torch.Tensor, eps: float) -> torch.Tensor:
    """Return float32 rows `[..., D]` times `rsqrt(|x|^2 + eps * D)`, as a new tensor."""
    length: torch.Tensor = torch.linalg.vector_norm(wide, 2, -1, True)
    scale = torch.addcmul(_floor(eps * wide.shape[-1]), length, length).rsqrt_()
    return wide * scale


def centred_factor(weight: torch.Tensor) -> torch.Tensor:
    """Return the factor of `unit_rows` for a zero-centred norm, float32 `[D]`."""
    return derived(weight, "norm", lambda w: (w.float() + 1.0).mul_(math.sqrt(w.shape[0])))


def blocks(x: torch.Tensor) -> list[slice]:
    """Cut the first dimension into slices of about BLOCK elements each."""
    rows = x.shape[0]
    size = max(1, BLOCK * rows // x.numel())
    return [slice(start, start + size) for start in range(0, rows, size)]


@cache
def _floor(value: float) -> torch.Tensor:
    return torch.tensor(value)
