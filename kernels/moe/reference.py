"""Reference routed experts, the oracle of tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def routed_experts_reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Compute `routed_experts` token by token and expert by expert, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += weight * (down[expert].double() @ (F.silu(gate) * up))
    return out
