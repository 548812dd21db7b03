"""Router and routed experts, torch CPU path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from vlm_serve.kernels.elementwise import silu, times_sigmoid
from vlm_serve.kernels.linear import Linear
from vlm_serve.kernels.linear.base import ChangedRows
from vlm_serve.kernels.linear.stored_codes import Stored
from vlm_serve.kernels.moe.beside import Beside


def route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), ids


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor | Stored | Sequence[Linear],
    down: torch.Tensor | Stored | Sequence[Linear],
    *,
    deterministic: bool,
    beside: Beside | None = None,
    changes: ChangedRows | None = None,
) -> torch.Tensor:
    # Each expert adds to a token at most once, and experts run in ascending order. So the order of
    # a token's sum depends on its own experts alone.
    total = x.new_zeros(x.shape, dtype=torch.float32)
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    hit, counts = torch.unique_consecutive(flat[order], return_counts=True)
    factors = weights.flatten()[order].float().unsqueeze(1)
    begin = 0
    for expert, count in zip(hit.tolist(), counts.tolist(), strict=True):
        end = begin + count
        tokens = order[begin:end] // ids.shape[1]
        own = None if changes is None else changes.kept(tokens)
        result = _expert(x[tokens], gate_up, down, expert, deterministic, own)
        total.index_add_(0, tokens, result * factors[begin:end])
        begin = end
    out = total.to(x.dtype)
    return out if beside is None else with_beside(out, beside)


def with_beside(out: torch.Tensor, beside: Beside) -> torch.Tensor:
    """Return the sum with its addend."""
    if beside.shared is not None and beside.gate is not None:
        out = out + times_sigmoid(beside.shared, beside.gate)
    return beside.residual + out


def _expert(
    x: torch.Tensor,
    gate_up: torch.Tensor | Stored | Sequence[Linear],
    down: torch.Tensor | Stored | Sequence[Linear],
    expert: int,
    deterministic: bool,
    changes: ChangedRows | None,
) -> torch.Tensor:
    if isinstance(gate_up, Stored):
        assert isinstance(down, Stored), "both stacked or both apart"
        rows, wide = 2 * down.depth, x.float()
        own = slice(expert * rows, (expert + 1) * rows)
        gate, up = F.linear(wide, gate_up.plain(own)).chunk(2, dim=-1)
        own = slice(expert * x.shape[1], (expert + 1) * x.shape[1])
        return F.linear(silu(gate) * up, down.plain(own))
    assert not isinstance(down, Stored), "both stacked or both apart"
    if isinstance(gate_up, torch.Tensor):
        assert isinstance(down, torch.Tensor), "both stacked or both apart"
        gate, up = F.linear(x, gate_up[expert]).chunk(2, dim=-1)
        return F.linear(silu(gate) * up, down[expert])
    assert not isinstance(down, torch.Tensor), "both stacked or both apart"
    gate_part, up_part = gate_up[2 * expert], gate_up[2 * expert + 1]
    hidden = gate_part.gated(up_part, x, deterministic=deterministic, changes=changes)
    return down[expert](hidden, deterministic=deterministic, changes=changes)
