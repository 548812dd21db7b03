"""Router and routed experts by torch, expert by expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F

from vlm_serve.kernels.elementwise.reference import silu_times, times_sigmoid
from vlm_serve.kernels.linear import Linear
from vlm_serve.kernels.linear.base import ChangedRows
from vlm_serve.kernels.linear.low_rank import addition_of
from vlm_serve.kernels.linear.low_rank_factors import ExpertSites, LowRankChange, Site, changes_at
from vlm_serve.kernels.linear.stored_codes import Stored
from vlm_serve.kernels.plain import widened

Weight = torch.Tensor | Stored | Sequence[Linear]
Expert = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Rows `[n, H]`, their numbers in the step and an expert: what it makes of them, `[n, H]`."""


class Addends(NamedTuple):
    """Terms of a layer's sum beside the routed experts. Each sum is rounded: first that with the
    shared expert, then that with the residual.

    Attributes:
        residual: `[T, H]`.
        shared: `[T, H]`, result of the shared expert, before its gate; None: there is none.
        gate: `[T, 1]`, logits of its gate.
    """

    residual: torch.Tensor
    shared: torch.Tensor | None = None
    gate: torch.Tensor | None = None


class Sigmoids(NamedTuple):
    """A choice by sigmoids.

    Attributes:
        bias: float32 `[E]`, added to the sigmoids for the choice alone; None: nothing is.
        scale: the sum of a token's weights, but for `floor`.
        floor: added to their divisor, the sum of the chosen sigmoids.
    """

    bias: torch.Tensor | None = None
    scale: float = 1.0
    floor: float = 1e-6


def route(
    logits: torch.Tensor, top_k: int, sigmoids: Sigmoids | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if sigmoids is not None:
        shares = torch.sigmoid(logits.float())
        ranked = shares if sigmoids.bias is None else shares + sigmoids.bias
        ids = ranked.topk(top_k, dim=-1).indices
        chosen = shares.gather(1, ids)
        weights = chosen / (chosen.sum(-1, keepdim=True) + sigmoids.floor) * sigmoids.scale
        return weights.to(logits.dtype), ids
    weights, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), ids


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    *,
    deterministic: bool,
    addends: Addends | None = None,
    changes: ChangedRows | None = None,
    sites: ExpertSites | None = None,
) -> torch.Tensor:
    """Add changes before the activation and before the weights: `sites` of experts in one piece,
    `changes` of others."""
    if isinstance(gate_up, torch.Tensor | Stored):
        assert not isinstance(down, Sequence), "both stacked or both apart"
        return _sum(x, weights, ids, _stacked(gate_up, down, sites), addends)
    assert isinstance(down, Sequence), "both stacked or both apart"
    gated = has_gates(gate_up, down)

    def expert(rows: torch.Tensor, tokens: torch.Tensor, index: int) -> torch.Tensor:
        kept_changes = None if changes is None else changes.kept(tokens)
        if gated:
            gate, up = gate_up[2 * index], gate_up[2 * index + 1]
            hidden = gate.gated(up, rows, deterministic=deterministic, changes=kept_changes)
        else:
            hidden = gate_up[index](
                rows, activation="relu2", deterministic=deterministic, changes=kept_changes
            )
        return down[index](hidden, deterministic=deterministic, changes=kept_changes)

    return _sum(x, weights, ids, expert, addends)


def has_gates(gate_up: Weight, down: Weight) -> bool:
    """Return True if experts have a gate beside up."""
    if isinstance(gate_up, Stored) and isinstance(down, Stored):
        experts = down.codes.shape[0] // gate_up.depth
        return gate_up.codes.shape[0] != experts * down.depth
    if isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor):
        return gate_up.shape[1] != down.shape[2]
    return isinstance(gate_up, Sequence) and len(gate_up) != len(cast("Sequence[Linear]", down))


def with_addends(out: torch.Tensor, addends: Addends) -> torch.Tensor:
    """Return the sum with its addend."""
    if addends.shared is not None and addends.gate is not None:
        out = out + times_sigmoid(addends.shared, addends.gate)
    return addends.residual + out


def _sum(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    expert: Expert,
    addends: Addends | None,
) -> torch.Tensor:
    """Add each expert's results, in ascending order: it depends on a token's own experts alone."""
    total = torch.zeros_like(widened(x))
    for index in sorted(set(ids.flatten().tolist())):
        tokens, places = (ids == index).nonzero(as_tuple=True)
        part = expert(x[tokens], tokens, index) * widened(weights[tokens, places])[:, None]
        total.index_add_(0, tokens, part)
    out = total.to(x.dtype)
    return out if addends is None else with_addends(out, addends)


def _stacked(
    gate_up: torch.Tensor | Stored, down: torch.Tensor | Stored, sites: ExpertSites | None
) -> Expert:
    """Return experts whose weights lie in one piece, with the changes of tokens' adapters."""
    gated = has_gates(gate_up, down)
    gate_up_of, down_of = ([], []) if sites is None else map(_changes, (sites.gate_up, sites.down))

    def expert(rows: torch.Tensor, tokens: torch.Tensor, index: int) -> torch.Tensor:
        width, inner = rows.shape[1], down.depth if isinstance(down, Stored) else down.shape[2]
        wide = F.linear(widened(rows), _plain(gate_up, index, (2 if gated else 1) * inner))
        wide = _added(wide, rows, tokens, index, gate_up_of)
        inside = silu_times(*wide.chunk(2, dim=-1)) if gated else wide.clamp(min=0).square()
        hidden = inside.to(rows.dtype)
        wide = F.linear(widened(hidden), _plain(down, index, width))
        return _added(wide, hidden, tokens, index, down_of)

    return expert


Changes = list[tuple[LowRankChange, torch.Tensor]]
"""Each adapter's change, and `[T]`, whether a token has the adapter."""


def _changes(site: Site) -> Changes:
    changes: Changes = []
    for change, rows in changes_at(site):
        mine = torch.zeros(len(site.groups.adapters), dtype=torch.bool, device=rows.device)
        mine[rows] = True
        changes.append((change.to(rows.device), mine))
    return changes


def _plain(weight: torch.Tensor | Stored, expert: int, rows: int) -> torch.Tensor:
    """Return an expert's weight as it is multiplied by."""
    if isinstance(weight, Stored):
        return weight.plain(slice(expert * rows, (expert + 1) * rows))
    return widened(weight[expert])


def _added(
    wide: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor, expert: int, changes: Changes
) -> torch.Tensor:
    """Add the changes by adapters of an expert's tokens, in place."""
    for change, mine in changes:
        expert_change = change.of_expert(expert)
        if expert_change is not None:
            rows = mine[tokens]
            wide[rows] += addition_of(expert_change, x[rows], wide.shape[1])
    return wide
