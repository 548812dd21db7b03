"""Causal depthwise convolution with SiLU over packed sequences, tails kept in state rows.

The short convolution of a Gated DeltaNet layer (Yang et al. 2024; transformers' causal_conv1d_fn
and causal_conv1d_update with activation "silu"). The tail of a sequence is its last K - 1 inputs.
"""

from __future__ import annotations

import torch

from vlm_serve.kernels.causal_conv import compiled, torch_cpu
from vlm_serve.kernels.checks import (
    FLOAT_DTYPES,
    KernelArgumentError,
    check_decode_meta,
    check_prefill_meta,
    check_tensor,
)
from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta

_TRITON = "vlm_serve.kernels.causal_conv.triton"
_prefill = Op(
    torch_cpu.causal_conv_prefill,
    compiled=compiled.causal_conv,
    triton=f"{_TRITON}:causal_conv_prefill",
)
_decode = Op(
    torch_cpu.causal_conv_decode,
    compiled=compiled.causal_conv,
    triton=f"{_TRITON}:causal_conv_decode",
)


def causal_conv_prefill(
    x: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor, meta: PrefillMeta
) -> torch.Tensor:
    """`y[t] = silu(sum_j weight[:, j] * x[t - K + 1 + j])` within each sequence.

    A sequence's first K - 1 outputs also see the tail in its source row (zeros for row -1); a slice
    shorter than K - 1 combines the old tail with its tokens. New tails go to the destination row
    and, at the chunks named in `meta.snapshots`, to snapshot rows. A token's bits depend on its K
    inputs only.

    Args:
        x: `[N, C]`, float32, bfloat16 or float16, dense last dimension.
        weight: `[C, K]`, the dtype of x, K >= 2.
        tails: `[rows, C, K - 1]` in the dtype of x, oldest column first, any row stride; written in
            place.
        meta: the slices.

    Returns:
        `[N, C]` in the dtype of x, contiguous.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    _check(x, weight, tails)
    check_prefill_meta(meta, x.shape[0], tails.shape[0])
    return _prefill(x.device, x, weight, tails, meta)


def causal_conv_decode(
    x: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor, meta: DecodeMeta
) -> torch.Tensor:
    """The same for one new token per sequence.

    Args:
        x: `[B, C]`, one token per sequence.
        weight, tails: as in `causal_conv_prefill`.
        meta: the sequences' rows.

    Returns:
        `[B, C]` in the dtype of x.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    _check(x, weight, tails)
    check_decode_meta(meta, x.shape[0], tails.shape[0])
    return _decode(x.device, x, weight, tails, meta)


def _check(x: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor) -> None:
    check_tensor("x", x, (None, None), FLOAT_DTYPES, x.device)
    check_tensor("weight", weight, (x.shape[1], None), (x.dtype,), x.device)
    if weight.shape[1] < 2:
        raise KernelArgumentError("weight", "expected a kernel of at least 2 taps")
    shape = (None, x.shape[1], weight.shape[1] - 1)
    check_tensor("tails", tails, shape, (x.dtype,), x.device)
