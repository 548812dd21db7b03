"""Write strengths and decays of the gated delta rule on a GPU, in one launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.triton_support import launch, power_of_two
from vlm_serve.kernels.triton_views import Rows, rows


class Gates(NamedTuple):
    """What the kernels of gates read and write."""

    raw: Rows
    neg_decay: torch.Tensor
    dt_bias: torch.Tensor
    beta: torch.Tensor
    decay: torch.Tensor


@triton.jit
def token_gates(row, gates, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Store one token's write strengths and decays."""
    heads = tl.arange(0, BLOCK)
    inside = heads < HEADS
    raw = gates.raw.at + row * gates.raw.stride
    strength = tl.load(raw + heads, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(raw + HEADS + heads, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(gates.dt_bias + heads, mask=inside, other=0.0)
    # log(1 + exp(x)) without overflow. If 1 + exp(-|x|) rounds to 1, its logarithm is exp(-|x|).
    small = tl.exp(-tl.abs(x))
    grown = 1.0 + small
    tail = tl.where(grown == 1.0, small, tl.log(grown) * (small / (grown - 1.0)))
    softplus = tl.maximum(x, 0.0) + tail
    factor = tl.load(gates.neg_decay + heads, mask=inside, other=0.0)
    tl.store(gates.beta + row * HEADS + heads, 1.0 / (1.0 + tl.exp(-strength)), mask=inside)
    tl.store(gates.decay + row * HEADS + heads, factor * softplus, mask=inside)


@triton.jit
def _gates_kernel(gates, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    token_gates(tl.program_id(0).to(tl.int64), gates, HEADS, BLOCK)


def gate_arguments(gates: Gates) -> dict[str, Any]:
    """Return the arguments of `token_gates`, by parameter name."""
    heads = len(gates.neg_decay)
    return {"gates": gates, "HEADS": heads, "BLOCK": power_of_two(heads)}


def gates(
    raw: torch.Tensor,
    neg_decay: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute both in one launch; an element's bits depend on it alone, `deterministic` or not."""
    beta, decay = torch.empty(2, len(raw), len(neg_decay), device=raw.device)
    arguments = gate_arguments(Gates(rows(raw), neg_decay, dt_bias, beta, decay))
    launch(_gates_kernel, (len(raw),), arguments, num_warps=1)
    return beta, decay
