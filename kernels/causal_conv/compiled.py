"""Causal depthwise convolution, compiled CPU path."""

from __future__ import annotations

import ctypes

import torch

from vlm_serve.kernels.causal_conv.reference import Behind
from vlm_serve.kernels.derived import derived
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta
from vlm_serve.kernels.native_layout import constant, struct
from vlm_serve.kernels.native_library import call
from vlm_serve.kernels.native_records import DTYPES, LANES, bits, packed

MAX_TAPS = constant("MAX_TAPS")

_Convolution = struct("Convolution")


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    tails: torch.Tensor,
    meta: PrefillMeta | DecodeMeta,
    behind: Behind,
) -> torch.Tensor | None:
    """Convolve prefill and decode alike: a decode token is a slice of one."""
    if x.dtype not in DTYPES or x.shape[1] % LANES or weight.shape[1] > MAX_TAPS:
        return None
    taps = derived(weight, "taps in rows", lambda w: w.float().T.contiguous())
    bias = None if behind.bias is None else derived(behind.bias, "float32", torch.Tensor.float)
    out = torch.empty(x.shape, dtype=x.dtype)
    job = _Convolution(
        packed=packed(meta),
        channels=x.shape[1],
        kernel=weight.shape[1],
        x_stride=x.stride(0),
        tail_row_stride=tails.stride(0),
        x=x.data_ptr(),
        taps=taps.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        silu=behind.silu,
        tails=tails.data_ptr(),
        out=out.data_ptr(),
    )
    call("vlm_causal_conv", ctypes.byref(job), bits(x))
    return out
