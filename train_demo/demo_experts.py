"""Feed-forward blocks for training: dense, a mixture of experts, and one made of the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from demo_shape import DemoShape
from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Router(nn.Module):
    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, hidden))


class Experts(nn.Module):
    def __init__(self, experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.zeros(experts, hidden, intermediate))


class SparseMLP(nn.Module):
    """Top-k routed experts plus a gated shared expert.

    All experts compute all tokens, and unrouted ones are multiplied by zero: at these sizes that is
    faster than gathering.
    """

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.top_k = shape.experts_per_token
        self.gate = Router(shape.experts, shape.hidden)
        self.experts = Experts(shape.experts, shape.hidden, shape.expert_intermediate)
        self.shared_expert = MLP(shape.hidden, shape.intermediate)
        self.shared_expert_gate = nn.Linear(shape.hidden, 1, bias=False)
        self.imbalance = torch.zeros(())
        """Load-balancing loss of the last forward: 1 when every expert gets its equal share."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        chances = F.linear(flat, self.gate.weight).softmax(-1)
        top, chosen = chances.topk(self.top_k, dim=-1)
        routed = torch.zeros_like(chances).scatter(1, chosen, top / top.sum(-1, keepdim=True))
        load = (routed > 0).float().mean(0) / self.top_k
        self.imbalance = chances.shape[1] * (load * chances.mean(0)).sum()
        experts, double, hidden = self.experts.gate_up_proj.shape
        inner = F.linear(flat, self.experts.gate_up_proj.view(-1, hidden))
        gate, up = inner.view(-1, experts, double).chunk(2, dim=-1)
        weighted = F.silu(gate) * up * routed[..., None]
        down = self.experts.down_proj.transpose(1, 2).reshape(-1, hidden)
        out = weighted.flatten(1) @ down
        shared = torch.sigmoid(self.shared_expert_gate(flat)) * self.shared_expert(flat)
        return cast(Tensor, (out + shared).view_as(x))


def imbalance(model: nn.Module) -> Tensor:
    """Return the mean load-balancing loss of the last forward's sparse layers; 0 if dense."""
    found = [module.imbalance for module in model.modules() if isinstance(module, SparseMLP)]
    return torch.stack(found).mean() if found else torch.zeros(())


def upcycle(dense: Mapping[str, Tensor], model: nn.Module) -> None:
    """Fill a sparse model with the weights of a dense one, so that it computes the same.

    The dense block becomes the shared expert, doubled because its gate starts at one half. Routed
    experts start with random inner and zero output weights, so they only add to it.
    """
    state = model.state_dict()
    generator = torch.Generator().manual_seed(0)
    for name, value in state.items():
        if ".mlp." not in name or name in dense:
            source = dense.get(name)
            if source is not None:
                value.copy_(source)
            continue
        if ".shared_expert." in name:
            value.copy_(dense[name.replace(".shared_expert.", ".")])
            if name.endswith("down_proj.weight"):
                value.mul_(2)
        elif name.endswith("gate_up_proj"):
            value.copy_(
                torch.randn(value.shape, generator=generator) * 0.7 * value.shape[-1] ** -0.5
            )
        elif name.endswith("mlp.gate.weight"):
            value.copy_(torch.randn(value.shape, generator=generator) * value.shape[-1] ** -0.5)
        else:
            value.zero_()
