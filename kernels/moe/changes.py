"""Routed experts in one piece with adapters, by torch: what the check at start compares the kernels
of `changed_triton.py` with."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vlm_serve.kernels.elementwise import silu
from vlm_serve.kernels.linear.low_rank import addition_of
from vlm_serve.kernels.linear.low_rank_factors import ExpertSites, LowRankChange, Site, changes_at
from vlm_serve.kernels.linear.stored_codes import Stored
from vlm_serve.kernels.moe.beside import Beside
from vlm_serve.kernels.moe.torch_cpu import with_beside


def changed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor | Stored,
    down: torch.Tensor | Stored,
    sites: ExpertSites,
    *,
    deterministic: bool,
    beside: Beside | None = None,
) -> torch.Tensor:
    """Compute as `routed_experts`, with changes before the activation and before the weights."""
    hidden, inner = x.shape[1], down.depth if isinstance(down, Stored) else down.shape[2]
    gate_up_of, down_of = _changes(sites.gate_up, x.device), _changes(sites.down, x.device)
    total = x.new_zeros(x.shape, dtype=torch.float32)
    for expert in sorted(set(ids.flatten().tolist())):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        rows = x[tokens]
        wide = F.linear(rows.float(), _plain(gate_up, expert, 2 * inner))
        gate, up = _added(wide, rows, tokens, expert, gate_up_of).chunk(2, dim=-1)
        rows = (silu(gate) * up).to(x.dtype)
        wide = F.linear(rows.float(), _plain(down, expert, hidden))
        wide = _added(wide, rows, tokens, expert, down_of)
        part = wide * weights[tokens, places].float().unsqueeze(1)
        total.index_add_(0, tokens, part.to(x.dtype).float())
    out = total.to(x.dtype)
    return out if beside is None else with_beside(out, beside)


Changes = list[tuple[LowRankChange, torch.Tensor]]
"""Each adapter's change, and `[T]`, whether a token has the adapter."""


def _changes(site: Site, device: torch.device) -> Changes:
    found: Changes = []
    for change, rows in changes_at(site):
        mine = torch.zeros(len(site.groups.adapters), dtype=torch.bool, device=device)
        mine[rows] = True
        found.append((change.to(device), mine))
    return found


def _plain(weight: torch.Tensor | Stored, expert: int, rows: int) -> torch.Tensor:
    """Return an expert's weight in float32."""
    if isinstance(weight, Stored):
        return weight.plain(slice(expert * rows, (expert + 1) * rows))
    return weight[expert].float()


def _added(
    wide: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor, expert: int, changes: Changes
) -> torch.Tensor:
    """Add the changes by adapters of an expert's tokens, in place."""
    for change, mine in changes:
        own = change.of_expert(expert)
        if own is not None:
            rows = mine[tokens]
            wide[rows] += addition_of(own, x[rows], wide.shape[1])
    return wide
