"""Causal depthwise convolution by torch, sequence by sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vlm_serve.kernels.elementwise.reference import times_sigmoid
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta
from vlm_serve.kernels.plain import sequences, widened


class Behind(NamedTuple):
    """Operations behind a convolution's sum.

    Attributes:
        bias: `[C]`, added to it first; None: nothing is.
        silu: whether the result is SiLU of that.
    """

    bias: torch.Tensor | None = None
    silu: bool = True


SILU, NOTHING = Behind(), Behind(silu=False)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    tails: torch.Tensor,
    meta: PrefillMeta | DecodeMeta,
    behind: Behind,
) -> torch.Tensor:
    """Convolve prefill and decode alike: a decode token is a slice of one."""
    out = torch.empty(x.shape, dtype=x.dtype)
    for begin, end, source, kept in sequences(meta):
        tail = None if source < 0 else tails[source]
        out[begin:end], seen = convolve(x[begin:end], weight, tail, behind)
        for token, row in kept:
            tails[row] = seen[token - begin :][: tails.shape[2]].T
    return out


def convolve(
    x: torch.Tensor, weight: torch.Tensor, tail: torch.Tensor | None, behind: Behind = SILU
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve one sequence.

    Args:
        x: `[n, C]`.
        weight: `[C, K]`.
        tail: `[C, K - 1]` or None for zeros.
        behind: what follows the sum.

    Returns:
        (output `[n, C]`, all inputs `[K - 1 + n, C]`: those of the tail first).
    """
    count, taps = len(x), weight.shape[1]
    before = x.new_zeros(taps - 1, x.shape[1]) if tail is None else tail.T
    seen = torch.cat([before, x])
    wide, factors = widened(seen), widened(weight)
    total = wide[:count] * factors[:, 0]
    for tap in range(1, taps):
        total = total + wide[tap : tap + count] * factors[:, tap]
    if behind.bias is not None:
        total = total + widened(behind.bias)
    return (times_sigmoid(total, total) if behind.silu else total).to(x.dtype), seen
