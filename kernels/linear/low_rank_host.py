"""What the kernels of low-rank changes compute, by torch: what the check at start compares them
with. A record names its factors by their addresses, and those that are held are found by them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear.low_rank_records import FIRST_UP, RANKS, SPAN, Reduced, Site


class Columns(Protocol):
    """See `low_rank_change.Up`."""

    @property
    def first(self) -> int: ...

    @property
    def offset(self) -> int: ...

    @property
    def values(self) -> torch.Tensor: ...


class Factors(Protocol):
    """A `Change`, or a `StackedChange`."""

    @property
    def down(self) -> torch.Tensor: ...

    @property
    def scales(self) -> torch.Tensor: ...

    @property
    def ups(self) -> Sequence[Columns]: ...


_held: WeakValueDictionary[tuple[int, int], Factors] = WeakValueDictionary()


def hold(record: list[int], change: Factors) -> None:
    """Let a record's factors be found for as long as they are in use."""
    _held[record[0], record[FIRST_UP]] = change


def held(site: Site, adapter: int) -> Factors | None:
    """Return an adapter's change of a projection; None if it leaves that alone.

    Raises:
        KernelArgumentError: nothing in use has the record's addresses.
    """
    record = site.records[adapter].tolist()
    if not record[2]:
        return None
    found = _held.get((record[0], record[FIRST_UP]))
    if found is None:
        raise KernelArgumentError("site", "its records are those of factors that are gone")
    return found


def reduced(x: torch.Tensor, norm: torch.Tensor | None, site: Site) -> Reduced:
    """Compute u as `low_rank_triton.reduced`; rows that stay as they are have zeros."""
    if norm is not None:
        x = (x.float() * (1.0 + norm.float())).to(x.dtype)
    splits, width = -(-x.shape[1] // SPAN), -(-site.width // RANKS) * RANKS
    u = torch.zeros(splits, len(x), width, device=x.device)
    for change, rows in groups(site):
        down, scales = change.down.to(x.device).float(), change.scales.to(x.device)
        for split in range(splits):
            own = slice(split * SPAN, (split + 1) * SPAN)
            u[split, rows, : len(down)] = F.linear(x[rows, own].float(), down[:, own]) * scales
    return Reduced(u, site)


def addition(change: Reduced, columns: int) -> torch.Tensor:
    """Return float32 `[T, columns]`, what the rows' adapters add to the sums."""
    u = change.u.sum(0)
    total = u.new_zeros(len(u), columns)
    for own, rows in groups(change.site):
        for up in own.ups:
            values = up.values.to(u.device).float()
            mine = u[rows, up.offset : up.offset + values.shape[1]]
            total[rows, up.first : up.first + len(values)] += F.linear(mine, values)
    return total


def groups(site: Site) -> Iterator[tuple[Factors, torch.Tensor]]:
    """Yield each adapter's change of a projection with its rows; none of rows that stay as they
    are."""
    for adapter in range(len(site.records)):
        rows = (site.groups.adapters == adapter).nonzero().flatten()
        change = held(site, adapter) if len(rows) else None
        if change is not None:
            yield change, rows
