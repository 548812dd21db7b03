"""Query/key norm and partial rotation, compiled CPU path."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

from vlm_serve.kernels.native_layout import constant
from vlm_serve.kernels.native_library import call
from vlm_serve.kernels.native_records import bits, knows_rows, rows
from vlm_serve.kernels.norms.compiled import centred
from vlm_serve.kernels.rope.reference import Rotation, frequencies_of

MAX_DIM = constant("MAX_DIM")
"""Largest head dim that compiled code supports."""


@cache
def axes(half: int, sections: tuple[int, ...], interleaved: bool) -> torch.Tensor:
    """Return each frequency's row of `positions`, int32 `[rot / 2]`."""
    taken = torch.zeros(half, dtype=torch.int32)
    for axis in (1, 2):
        taken[frequencies_of(axis, sections, interleaved)] = axis
    return taken


def mrope_cos_sin(
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    sections: Sequence[int],
    scale: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, half = positions.shape[1], inv_freq.shape[0]
    cos, sin = torch.empty(tokens, half), torch.empty(tokens, half)
    positions = positions.double().contiguous()
    call(
        "vlm_rotations",
        tokens,
        half,
        torch.get_num_threads(),
        positions.data_ptr(),
        inv_freq.data_ptr(),
        axes(half, tuple(sections), interleaved).data_ptr(),
        scale,
        cos.data_ptr(),
        sin.data_ptr(),
    )
    return cos, sin


def qk_norm_rope(
    q: torch.Tensor, k: torch.Tensor, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not (knows_rows(q) and knows_rows(k) and q.shape[2] <= MAX_DIM):
        return None
    q_weight, k_weight, cos, sin, eps = rotation
    cos, sin = cos.contiguous(), sin.contiguous()
    return _norm_rope(q, q_weight, cos, sin, eps), _norm_rope(k, k_weight, cos, sin, eps)


def _norm_rope(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """Normalise and rotate all heads; `cos` and `sin` are contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype)
    call(
        "vlm_norm_rope",
        ctypes.byref(rows(x, out)),
        None if weight is None else centred(weight).data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[1],
        eps,
        bits(x),
    )
    return out
