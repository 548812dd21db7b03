"""Write strengths and decays of the gated delta rule on a GPU, in one launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.triton_support import launch, power_of_two


@triton.jit
def token_gates(
    row,
    raw,
    neg_decay,
    dt_bias,
    beta,
    decay,
    raw_stride,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store one token's write strengths and decays."""
    heads = tl.arange(0, BLOCK)
    inside = heads < HEADS
    strength = tl.load(raw + row * raw_stride + heads, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(raw + row * raw_stride + HEADS + heads, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + heads, mask=inside, other=0.0)
    # log(1 + exp(x)) without overflow. If 1 + exp(-|x|) rounds to 1, its logarithm is exp(-|x|).
    small = tl.exp(-tl.abs(x))
    grown = 1.0 + small
    tail = tl.where(grown == 1.0, small, tl.log(grown) * (small / (grown - 1.0)))
    softplus = tl.maximum(x, 0.0) + tail
    factor = tl.load(neg_decay + heads, mask=inside, other=0.0)
    tl.store(beta + row * HEADS + heads, 1.0 / (1.0 + tl.exp(-strength)), mask=inside)
    tl.store(decay + row * HEADS + heads, factor * softplus, mask=inside)


@triton.jit
def _gates_kernel(
    raw,
    neg_decay,
    dt_bias,
    beta,
    decay,
    raw_stride,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token_gates(row, raw, neg_decay, dt_bias, beta, decay, raw_stride, HEADS, BLOCK)


def gates(
    raw: torch.Tensor,
    neg_decay: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute both in one launch; an element's bits depend on it alone, `deterministic` or not."""
    rows, heads = raw.shape[0], neg_decay.shape[0]
    beta, decay = torch.empty(2, rows, heads, device=raw.device)
    arguments = {
        "raw": raw,
        "neg_decay": neg_decay,
        "dt_bias": dt_bias,
        "beta": beta,
        "decay": decay,
        "raw_stride": raw.stride(0),
        "HEADS": heads,
        "BLOCK": power_of_two(heads),
    }
    launch(_gates_kernel, (rows,), arguments, num_warps=1)
    return beta, decay
