"""An adapter's changes of routed experts with weights in one piece, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import accumulate

import torch

from vlm_serve.kernels.linear.low_rank_change import StackedChange, Up
from vlm_serve.models.adapters.low_rank import LowRank
from vlm_serve.models.adapters.rows import Rows


def stacked_change(rows: Sequence[Rows], count: int, named: Mapping[str, LowRank]) -> StackedChange:
    """Return the changes of all experts of a weight.

    Args:
        rows: parts of every expert: gate and up, or down.
        count: number of experts.
        named: an adapter's modules; at least one is changed.
    """
    parts = len(rows) // count
    experts = [rows[first : first + parts] for first in range(0, len(rows), parts)]
    changed = [own for own in experts if any(each.module in named for each in own)]
    own = [[named.get(each.module) for each in expert] for expert in changed]
    ranks = [
        max(0 if each is None else each.rank for each in part) for part in zip(*own, strict=True)
    ]
    shared = parts == 2 and all(_share(gate, up) for gate, up in own)
    offsets = [0] * parts if shared else [0, *accumulate(ranks)][:parts]
    kinds = [each.down.dtype for expert in own for each in expert if each is not None]
    dtype, columns = reduce(torch.promote_types, kinds), rows[0].columns
    width = max(first + rank for first, rank in zip(offsets, ranks, strict=True))
    down = torch.zeros(len(changed), width, len(columns), dtype=dtype)
    scales = torch.zeros(len(changed), width)
    sizes = [sum(map(len, each.ranges)) for each in experts[0]]
    values = [
        torch.zeros(len(changed), size, rank, dtype=dtype)
        for size, rank in zip(sizes, ranks, strict=True)
    ]
    for place, (places, changes) in enumerate(zip(changed, own, strict=True)):
        for part, (each, change) in enumerate(zip(places, changes, strict=True)):
            if change is None:
                continue
            mine = slice(offsets[part], offsets[part] + change.rank)
            down[place, mine] = change.down[:, columns.start : columns.stop].to(dtype)
            scales[place, mine] = change.scale
            up = torch.cat([change.up[one.start : one.stop] for one in each.ranges])
            values[part][place, :, : change.rank] = up.to(dtype)
    firsts = [0, *accumulate(sizes)]
    ups = tuple(Up(*each) for each in zip(firsts, offsets, values, strict=False))
    return StackedChange(down, scales, ups, _places(experts, named))


def stacked_alike(
    rows: Sequence[Rows], count: int, rank: int, factor: Callable[[int, int], torch.Tensor]
) -> StackedChange:
    """Return changes that all experts share, in the memory of one expert's; see `uniform`."""
    own = rows[: len(rows) // count]
    sizes = [sum(map(len, each.ranges)) for each in own]
    firsts = [0, *accumulate(sizes)]
    ups = tuple(
        Up(first, 0, factor(size, rank).unsqueeze(0))
        for first, size in zip(firsts, sizes, strict=False)
    )
    down = factor(rank, len(rows[0].columns)).unsqueeze(0)
    return StackedChange(down, torch.ones(1, rank), ups, torch.zeros(count, dtype=torch.int32))


def _share(gate: LowRank | None, up: LowRank | None) -> bool:
    """Return True if gate and up have the same A, as experts in one tensor do."""
    if gate is None or up is None:
        return False
    same = gate.down.data_ptr() == up.down.data_ptr() and gate.down.shape == up.down.shape
    return same and gate.scale == up.scale


def _places(experts: Sequence[Sequence[Rows]], named: Mapping[str, LowRank]) -> torch.Tensor:
    changed = [any(each.module in named for each in own) for own in experts]
    places = torch.tensor(changed, dtype=torch.int32).cumsum(0, dtype=torch.int32) - 1
    places[~torch.tensor(changed)] = -1
    return places
