"""An adapter's modules in the memory of its changes, so that a host holds factors once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from vlm_serve.kernels.linear.low_rank_change import Change, StackedChange
from vlm_serve.models.adapters.low_rank import LowRank
from vlm_serve.models.adapters.rows import Rows


def shared(
    named: Mapping[str, LowRank],
    sites: Iterable[tuple[Sequence[Rows], int, Change | StackedChange]],
) -> dict[str, LowRank]:
    """Return an adapter's modules. A factor that a change holds whole is a view of that.

    Args:
        named: the modules.
        sites: parts of each changed projection, the experts in one piece or 0, and its change.
    """
    found = dict(named)
    for rows, count, change in sites:
        for module, down, up in _factors(rows, count, change, named):
            own = found[module]
            found[module] = LowRank(_same(down, own.down), _same(up, own.up), own.scale)
    return found


def to_send(named: Mapping[str, LowRank]) -> dict[str, LowRank]:
    """Return an adapter's modules with factors in memory of their own. A pickle of a view has all
    that its memory holds. Modules with one factor share it still."""
    alone: dict[tuple[object, ...], torch.Tensor] = {}

    def own(factor: torch.Tensor) -> torch.Tensor:
        key = factor.data_ptr(), factor.shape, factor.stride(), factor.dtype
        if key not in alone:
            whole = factor.untyped_storage().nbytes() == factor.nbytes
            alone[key] = factor if whole else factor.clone()
        return alone[key]

    return {name: LowRank(own(each.down), own(each.up), each.scale) for name, each in named.items()}


def _same(view: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return the view if it is the factor; a share of it, or its rows in another order, is not."""
    same = view.shape == own.shape and view.dtype == own.dtype and torch.equal(view, own)
    return view if same else own


def _factors(
    rows: Sequence[Rows], count: int, change: Change | StackedChange, named: Mapping[str, LowRank]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the changed modules of a projection, with A and B as its change holds them."""
    if isinstance(change, Change):
        changed = [each.module for each in rows if each.module in named]
        for module, up in zip(changed, change.ups, strict=True):
            rank = up.values.shape[1]
            yield module, change.down[up.offset : up.offset + rank], up.values
        return
    parts = len(rows) // count
    for number, each in enumerate(rows):
        expert, part = divmod(number, parts)
        if each.module in named:
            rank, up = named[each.module].rank, change.ups[part]
            place = int(change.places[expert])
            own = change.down[place, up.offset : up.offset + rank]
            yield each.module, own, up.values[place, :, :rank]
