"""Routed experts, torch CPU path."""

from __future__ import annotations

import torch

from vlm_serve.kernels.elementwise import silu
from vlm_serve.kernels.linear import linear


def route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), ids


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    deterministic: bool,
) -> torch.Tensor:
    tokens, top_k = ids.shape
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=gate_up.shape[0]).tolist()
    parts = x.new_empty(tokens * top_k, x.shape[1])
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            picked = order[begin : begin + count]
            gate, up = linear(
                x[picked // top_k], gate_up[expert], deterministic=deterministic
            ).chunk(2, dim=-1)
            parts[picked] = linear(silu(gate) * up, down[expert], deterministic=deterministic)
            begin += count
    return (parts.view(tokens, top_k, x.shape[1]) * weights.unsqueeze(-1)).sum(1)
