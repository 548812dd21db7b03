"""Low-rank changes of projections (LoRA): `u = scale * (x @ down.T)`, then `+ u @ up.T`.

A row's bits depend on the row, the weight and the row's own adapter. Compiled steps let the chain
of each column go on (`native/products/low_rank.h`). On a GPU kernels add the change
(`low_rank_rows.py`), and elsewhere torch does. It is added to the product in float32, before the
activation, the factor or the residual, and the sum is rounded once.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from vlm_serve.kernels.elementwise import ACTIVATIONS, silu_times
from vlm_serve.kernels.linear.base import Epilogue, Linear
from vlm_serve.kernels.linear.dense import PackedDense
from vlm_serve.kernels.linear.few_rows import MOST_ROWS
from vlm_serve.kernels.linear.low_rank_change import Change, StackedChange, Up, records_of
from vlm_serve.kernels.linear.low_rank_records import ExpertSites, Groups, Reduced
from vlm_serve.kernels.linear.low_rank_rows import GroupedRows, by_kernels
from vlm_serve.kernels.linear.packed import PANEL
from vlm_serve.kernels.native_layout import struct

_Part, _Change = struct("LowRankPart"), struct("LowRankChange")


class PackedChange:
    """A change in the layout of `native/products/low_rank.h`.

    Attributes:
        record: for compiled code; lives as long as this object.
        nbytes: in memory.
    """

    def __init__(self, change: Change) -> None:
        down = change.down
        self._down = PackedDense.of([down], len(down), down.shape[1], down.dtype)
        self._scales = change.scales.contiguous()
        self._panels = [_panels(each) for each in change.ups]
        parts = [
            _Part(
                first=up.first // PANEL,
                last=up.first // PANEL + len(panels),
                offset=up.offset,
                rank=up.values.shape[1],
                up=panels.data_ptr(),
            )
            for up, panels in zip(change.ups, self._panels, strict=True)
        ]
        self._parts = (_Part * len(parts))(*parts)
        self.record = _Change(
            down=self._down.record(),
            scales=self._scales.data_ptr(),
            count=len(parts),
            parts=ctypes.addressof(self._parts),
        )
        self.nbytes = self._down.nbytes + sum(each.nbytes for each in self._panels)


def _panels(up: Up) -> torch.Tensor:
    """Lay columns out as float32 `[panels, rank, 32]`, with zeros where others' columns are."""
    count, rank = up.values.shape
    skip = up.first % PANEL
    panels = -(-(skip + count) // PANEL)
    wide = torch.zeros(panels * PANEL, rank)
    wide[skip : skip + count] = up.values
    return wide.view(panels, PANEL, rank).transpose(1, 2).contiguous()


class AdapterChanges:
    """The changes of one adapter.

    Args:
        by_site: by sites: the numbers of projections, from 1 on.
        sites: the number of sites of the model.
        tower: whether the vision tower is changed.
        room: fewest elements of u by site, as if the ranks were those of larger adapters; ()
            for no such room.

    Attributes:
        widest: most elements of u.
    """

    def __init__(
        self,
        by_site: Mapping[int, Change | StackedChange],
        sites: int,
        *,
        tower: bool = False,
        room: Sequence[int] = (),
    ) -> None:
        self.by_site = by_site
        self.tower = tower
        self._room = room
        self.widest = max((each.width for each in by_site.values()), default=0)
        self._sites = sites
        self._layout: _Layout | None = None
        self._placed: Mapping[int, Change | StackedChange] | None = None
        self._records: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def factor_bytes(self) -> int:
        """Bytes of all factors."""
        changes = self.by_site.values()
        return sum(own.down.nbytes + sum(up.values.nbytes for up in own.ups) for own in changes)

    def lay_out(self) -> None:
        """Lay everything out for compiled code, unless that has been done."""
        if self._layout is None:
            apart = {site: each for site, each in self.by_site.items() if isinstance(each, Change)}
            self._layout = _Layout(apart, self._sites)

    def place(self, device: torch.device) -> None:
        """Copy everything to a device, once."""
        if self._placed is None:
            placed = {site: change.to(device) for site, change in self.by_site.items()}
            records = records_of(placed, self._sites)
            # All or nothing: a device without memory for one of them is asked again.
            self._records, self._placed = (records, records.to(device)), placed

    def records(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `records_of` for the kernels of a device, on the host and there; places everything
        there first."""
        self.place(device)
        assert self._records is not None
        return self._records

    def at(self, site: int, device: torch.device) -> Change:
        """Return the change of a projection on a device; copies it, unless it was placed there."""
        change = (self.by_site if self._placed is None else self._placed)[site]
        assert isinstance(change, Change), "experts in one piece are changed together"
        return change if change.down.device == device else change.to(device)

    def width(self, site: int) -> int:
        """Return the elements of u of a projection."""
        own = self.by_site.get(site)
        return 0 if own is None else max(own.width, self._room[site] if self._room else 0)

    def drop_layout(self) -> None:
        """Free the results of `lay_out` and `place`."""
        self._layout, self._placed, self._records = None, None, None

    @property
    def layout_bytes(self) -> int:
        """Bytes that `lay_out` and `place` have made."""
        placed = 0 if self._placed is None else sum(each.nbytes for each in self._placed.values())
        return placed + (0 if self._layout is None else self._layout.nbytes)

    def address(self) -> int:
        """Return the address of the records of all sites, for compiled code."""
        self.lay_out()
        assert self._layout is not None
        return ctypes.addressof(self._layout.records)


class _Layout:
    """The changes of all sites, in the layout of compiled code."""

    def __init__(self, by_site: Mapping[int, Change], sites: int) -> None:
        self._packed = {site: PackedChange(each) for site, each in by_site.items()}
        self.nbytes = sum(each.nbytes for each in self._packed.values())
        none = _Change()
        records = [
            self._packed[site].record if site in by_site else none for site in range(sites + 1)
        ]
        self.records: Any = (_Change * len(records))(*records)


class RowChanges:
    """Which adapter changes which row.

    Args:
        adapters: those of the step.
        of_rows: index of each row's adapter, -1 for none.
        slots: the executor's slots of the adapters; None: nobody asks for them.
    """

    def __init__(
        self,
        adapters: Sequence[AdapterChanges],
        of_rows: Sequence[int],
        slots: Sequence[int] | None = None,
    ) -> None:
        self.adapters = tuple(adapters)
        self.of_rows = array("q", of_rows)
        self.slots = tuple(range(len(self.adapters)) if slots is None else slots)
        self._used = sorted(set(self.of_rows) - {-1})
        self._grouped: dict[torch.device, GroupedRows] = {}
        self._groups: dict[tuple[torch.device, tuple[bool, ...]], Groups] = {}

    @classmethod
    def of_all(cls, changes: AdapterChanges | None, rows: int) -> RowChanges | None:
        """Return those of rows that all have one adapter, or none."""
        return None if changes is None else cls([changes], [0] * rows)

    def kept(self, rows: torch.Tensor) -> RowChanges:
        """Return the same for some of the rows, in their order."""
        if len(set(self.of_rows)) == 1:  # Nothing has to wait for the device.
            return RowChanges(self.adapters, self.of_rows[:1] * len(rows), self.slots)
        return RowChanges(self.adapters, [self.of_rows[row] for row in rows.tolist()], self.slots)

    def grouped(self, device: torch.device) -> GroupedRows:
        """Return the rows for the kernels of a device."""
        if device not in self._grouped:
            records = torch.stack([each.records(device)[1] for each in self.adapters])
            self._grouped[device] = GroupedRows(
                records, self._width, lambda site: self._groups_at(site, device)
            )
        return self._grouped[device]

    def _width(self, site: int) -> int:
        return max((each.width(site) for each in self.adapters), default=0)

    def _groups_at(self, site: int, device: torch.device) -> Groups:
        """Return the groups of rows, in which rows that a site's changes leave alone have none."""
        key = device, tuple(site in each.by_site for each in self.adapters)
        if key not in self._groups:
            own = [each if each >= 0 and key[1][each] else -1 for each in self.of_rows]
            # A few of many rows have the bits of many: a few alone take another kernel.
            least = MOST_ROWS + 1 if len(own) > MOST_ROWS else 0
            self._groups[key] = Groups.of(own, device, least)
        return self._groups[key]

    def few(self, site: int, x: torch.Tensor, norm: torch.Tensor | None = None) -> Reduced | None:
        """Compute u of a few rows, see `GroupedRows.reduced`; None if no row is changed."""
        if not self.reaches(site):
            return None
        return self.grouped(x.device).reduced(site, x, norm)

    def experts(self, sites: tuple[int, int], device: torch.device) -> ExpertSites | None:
        """Return the changes of experts in one piece; None if those of no row are changed."""
        if not any(map(self.reaches, sites)):
            return None
        rows = self.grouped(device)
        return ExpertSites(*map(rows.at, sites))

    def groups(
        self, site: int, device: torch.device
    ) -> Iterator[tuple[Change | None, torch.Tensor]]:
        """Yield each change of a projection with its rows, on a device; None: rows that stay as
        they are."""
        found: dict[int, list[int]] = {}
        for row, adapter in enumerate(self.of_rows):
            known = adapter >= 0 and site in self.adapters[adapter].by_site
            found.setdefault(adapter if known else -1, []).append(row)
        for adapter, rows in found.items():
            change = None if adapter < 0 else self.adapters[adapter].at(site, device)
            yield change, torch.tensor(rows, device=device)

    def reaches(self, site: int) -> bool:
        """Tell whether the adapter of any row changes a projection."""
        return any(site in self.adapters[each].by_site for each in self._used)

    def changed(self, sites: Sequence[int]) -> list[bool]:
        """Tell for each row whether its adapter changes any of these projections."""
        known = [any(site in each.by_site for site in sites) for each in self.adapters]
        return [adapter >= 0 and known[adapter] for adapter in self.of_rows]

    def added(self, weight: Linear, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Add the changes by the adapters of x's rows to products in float32, in place."""
        first = 0
        for leaf in weight.leaves():
            own = slice(first, first + leaf.columns)
            if by_kernels(x.device):
                if self.reaches(leaf.site):
                    self.grouped(x.device).added(leaf.site, x, out[:, own])
                first = own.stop
                continue
            for change, rows in self.groups(leaf.site, x.device):
                if change is not None:
                    out[rows, own] += change.of(x[rows], leaf.columns)
            first = own.stop
        return out

    def multiplied(
        self, weight: Linear, x: torch.Tensor, after: Epilogue, *, deterministic: bool
    ) -> torch.Tensor:
        """Compute a call of a projection of one format, with checked arguments."""
        if by_kernels(x.device):
            return self.grouped(x.device).multiplied(weight, x, after, deterministic=deterministic)
        out = x.new_empty(x.shape[0], weight.columns)
        for change, place in self.groups(weight.site, x.device):
            mine = after.of(itemgetter(place))
            if change is None:
                out[place] = weight._multiply(x[place], mine, deterministic)
                continue
            wide = weight.partial(x[place], deterministic=True)
            wide = wide + change.of(x[place], weight.columns)
            if mine.activation is not None:
                wide = ACTIVATIONS[mine.activation](wide)
            if mine.times is not None:
                wide = wide * mine.times
            if mine.plus is not None:
                wide = wide + mine.plus
            out[place] = wide.to(x.dtype)
        return out

    def gated(
        self, gate: Linear, up: Linear, x: torch.Tensor, *, deterministic: bool
    ) -> torch.Tensor:
        """Compute `gate.gated`; rows whose adapters change neither have the bits that they have
        without adapters."""
        changed = self.changed([leaf.site for each in (gate, up) for leaf in each.leaves()])
        if not any(changed):
            return gate.gated(up, x, deterministic=deterministic)
        out = x.new_empty(x.shape[0], gate.columns)
        for kind in (True, False):
            own = torch.tensor([row for row, each in enumerate(changed) if each is kind])
            if not len(own):
                continue
            place = own.to(x.device)
            if kind:
                mine, rows = self.kept(own), x[place]
                both = (
                    each(rows, deterministic=deterministic, changes=mine) for each in (gate, up)
                )
                out[place] = silu_times(*both)
            else:
                out[place] = gate.gated(up, x[place], deterministic=deterministic)
        return out
