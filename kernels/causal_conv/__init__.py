"""Causal depthwise convolution over packed sequences, with tails kept in state rows.

The short convolution of a Gated DeltaNet layer, followed by SiLU (Yang et al. 2024; transformers'
causal_conv1d_fn and causal_conv1d_update), and of LFM2's layers, without. The tail of a sequence is
its last K - 1 inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch

from vlm_serve.kernels.causal_conv import compiled, reference
from vlm_serve.kernels.causal_conv.reference import SILU, Behind
from vlm_serve.kernels.checks import (
    FLOAT_DTYPES,
    KernelArgumentError,
    check_meta,
    check_tensor,
)
from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta, VerifyMeta

_TRITON = "vlm_serve.kernels.causal_conv.triton"
_prefill = Op(
    reference.causal_conv,
    compiled=compiled.causal_conv,
    triton=f"{_TRITON}:causal_conv_prefill",
)
_decode = Op(
    reference.causal_conv,
    compiled=compiled.causal_conv,
    triton=f"{_TRITON}:causal_conv_decode",
)


def _verify_by_steps(
    x: torch.Tensor,
    weight: torch.Tensor,
    tails: torch.Tensor,
    inputs: torch.Tensor,
    meta: VerifyMeta,
    behind: Behind,
) -> torch.Tensor:
    """Convolve the slices' first tokens, then their second ones, and so on."""
    fold_tails(tails, inputs, meta.folds)
    window, out = tails[list(meta.rows)], torch.empty_like(x)
    for tokens, step in _decode_steps(meta):
        out[tokens] = _decode(x.device, x[tokens], weight, window, step, behind)
    for first, (begin, end) in zip(meta.updates, pairwise(meta.cu_seqlens), strict=True):
        inputs[first : first + end - begin] = x[begin:end]
    return out


_verify = Op(_verify_by_steps, triton="vlm_serve.kernels.causal_conv.triton:causal_conv_verify")


def causal_conv_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    tails: torch.Tensor,
    meta: PrefillMeta,
    behind: Behind = SILU,
) -> torch.Tensor:
    """Compute `y[t] = f(bias + sum_j weight[:, j] * x[t - K + 1 + j])` within each sequence.

    A sequence's first K - 1 outputs also read the tail in its source row (zeros for row -1). A
    slice shorter than K - 1 combines the old tail with its tokens. New tails go to the destination
    row and, at the chunks named in `meta.snapshots`, to snapshot rows. A token's bits depend on
    its K inputs only.

    Args:
        x: `[N, C]`, float32, bfloat16 or float16, dense last dimension.
        weight: `[C, K]`, the dtype of x, K >= 2.
        tails: `[rows, C, K - 1]` in the dtype of x, oldest column first, any row stride; written in
            place.
        meta: the slices.
        behind: the bias and f, which follow the sum.

    Returns:
        `[N, C]` in the dtype of x, contiguous.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    _check(x, weight, tails, behind)
    check_meta(meta, x.shape[0], tails.shape[0])
    return _prefill(x.device, x, weight, tails, meta, behind)


def causal_conv_decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    tails: torch.Tensor,
    meta: DecodeMeta,
    behind: Behind = SILU,
) -> torch.Tensor:
    """Convolve one new token per sequence, as `causal_conv_prefill` would.

    Args:
        x: `[B, C]`, one token per sequence.
        weight, tails, behind: as in `causal_conv_prefill`.
        meta: the sequences' rows.

    Returns:
        `[B, C]` in the dtype of x.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    _check(x, weight, tails, behind)
    check_meta(meta, x.shape[0], tails.shape[0])
    return _decode(x.device, x, weight, tails, meta, behind)


def causal_conv_verify(
    x: torch.Tensor,
    weight: torch.Tensor,
    tails: torch.Tensor,
    inputs: torch.Tensor,
    meta: VerifyMeta,
    behind: Behind = SILU,
) -> torch.Tensor:
    """Convolve drafted tokens, by the arithmetic of `causal_conv_decode`.

    First the tails absorb the folded inputs; beyond that, they stay as they are.

    Args:
        x: `[N, C]`.
        weight, tails, behind: as in `causal_conv_prefill`.
        inputs: `[entries, C]`, inputs of updates; x is written there.
        meta: the slices.

    Returns:
        `[N, C]` in the dtype of x.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    _check(x, weight, tails, behind)
    check_meta(meta, x.shape[0], tails.shape[0], inputs.shape[0])
    return _verify(x.device, x, weight, tails, inputs, meta, behind)


def fold_tails(
    tails: torch.Tensor, inputs: torch.Tensor, folds: Sequence[tuple[int, int, int]]
) -> None:
    """Shift the inputs of updates into tails, in place: (row, first update, count) each."""
    kept = tails.shape[2]
    for row, first, count in folds:
        if count:
            seen = torch.cat((tails[row], inputs[first : first + count].T), dim=1)
            tails[row].copy_(seen[:, -kept:])


def _decode_steps(meta: VerifyMeta) -> list[tuple[list[int], DecodeMeta]]:
    """Cut the slices into decode steps: their first tokens, their second ones, and so on.

    The steps' state rows are numbered by sequence.
    """
    if "decode steps" not in meta.plans:
        slices = list(pairwise(meta.cu_seqlens))
        steps = []
        for offset in range(max(end - begin for begin, end in slices)):
            continued = tuple(i for i, (begin, end) in enumerate(slices) if begin + offset < end)
            none = (-1,) * len(continued)
            step = DecodeMeta(
                ((),) * len(continued), (0,) * len(continued), continued, continued, none
            )
            steps.append(([slices[i][0] + offset for i in continued], step))
        meta.plans["decode steps"] = steps
    return cast("list[tuple[list[int], DecodeMeta]]", meta.plans["decode steps"])


def _check(x: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor, behind: Behind) -> None:
    check_tensor("x", x, (None, None), FLOAT_DTYPES, x.device)
    check_tensor("weight", weight, (x.shape[1], None), (x.dtype,), x.device)
    if weight.shape[1] < 2:
        raise KernelArgumentError("weight", "expected a kernel of at least 2 taps")
    shape = (None, x.shape[1], weight.shape[1] - 1)
    check_tensor("tails", tails, shape, (x.dtype,), x.device)
    if behind.bias is not None:
        check_tensor("behind.bias", behind.bias, (x.shape[1],), (x.dtype,), x.device)
