"""Low-rank changes of projections (LoRA): `u = scale * (x @ down.T)`, then `+ u @ up.T`.

A row's bits depend on the row, the weight and the row's own adapter. Compiled steps let the chain
of each column go on (`native/products/low_rank.h`). On a GPU kernels add the change
(`low_rank_triton.py`), and elsewhere torch does. It is added to the product in float32, before the
activation, the factor or the residual, and the sum is rounded once. Rows without an adapter get
what the base computes for them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

import torch

from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.elementwise import silu_times
from vlm_serve.kernels.linear.base import Epilogue, Linear
from vlm_serve.kernels.linear.dense import PackedChanges
from vlm_serve.kernels.linear.few_rows import MOST_ROWS
from vlm_serve.kernels.linear.fixed import MIN_COLUMNS, fixed_product, followed, with_rows
from vlm_serve.kernels.linear.low_rank_factors import (
    ExpertSites,
    Groups,
    LowRankChange,
    Reduced,
    Site,
    addition,
    changes_at,
    records_of,
    reduced_by_torch,
)


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
        by_site: Mapping[int, LowRankChange],
        sites: int,
        *,
        tower: bool = False,
        room: Sequence[int] = (),
    ) -> None:
        self.by_site = by_site
        self.tower = tower
        self._room = room
        self.widest = max((change.width for change in by_site.values()), default=0)
        self._sites = sites
        self._layout: PackedChanges | None = None
        self._placed: Mapping[int, LowRankChange] | None = None
        self._records: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def factor_bytes(self) -> int:
        """Bytes of all factors."""
        return sum(change.factor_bytes for change in self.by_site.values())

    def lay_out(self) -> None:
        """Lay everything out for compiled code, unless that has been done."""
        if self._layout is None:
            apart = {site: change for site, change in self.by_site.items() if change.places is None}
            self._layout = PackedChanges(apart, self._sites)

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

    def at(self, site: int, device: torch.device) -> LowRankChange:
        """Return the change of a projection on a device; copies it, unless it was placed there."""
        change = (self.by_site if self._placed is None else self._placed)[site]
        assert change.places is None, "experts in one piece are changed together"
        return change if change.down.device == device else change.to(device)

    def width(self, site: int) -> int:
        """Return the elements of u of a projection."""
        change = self.by_site.get(site)
        return 0 if change is None else max(change.width, self._room[site] if self._room else 0)

    def drop_layout(self) -> None:
        """Free the results of `lay_out` and `place`."""
        self._layout, self._placed, self._records = None, None, None

    @property
    def layout_bytes(self) -> int:
        """Bytes that `lay_out` and `place` have made."""
        placed = (
            0 if self._placed is None else sum(change.nbytes for change in self._placed.values())
        )
        return placed + (0 if self._layout is None else self._layout.nbytes)

    def address(self) -> int:
        """Return the address of the records of all sites, for compiled code."""
        self.lay_out()
        assert self._layout is not None
        return self._layout.address


def _extended_by_torch(
    out: torch.Tensor, sums: torch.Tensor, after: Epilogue, change: Reduced
) -> None:
    """Write results of rows that have a change: their sums, float32 `[T, N]`, with the change, and
    what follows."""
    added = addition(change, out.shape[1])
    for _, rows in changes_at(change.site):
        total = sums[rows].float() + added[rows]
        out[rows] = followed(total, after.of(itemgetter(rows))).to(out.dtype)


_TRITON = "vlm_serve.kernels.linear.low_rank_triton"
_reduced = Op(reduced_by_torch, triton=f"{_TRITON}:reduced")
extended = Op(_extended_by_torch, triton=f"{_TRITON}:extended")


def by_kernels(device: torch.device) -> bool:
    """Return True if kernels add the changes of rows on a device."""
    return extended.on_triton(device)


def addition_of(change: LowRankChange, x: torch.Tensor, columns: int) -> torch.Tensor:
    """Return float32 `[T, columns]`, the sum that x's rows get by a change of one projection."""
    u = _product(x.float(), change.down.float()) * change.scales
    total = u.new_zeros(len(x), columns)
    for up in change.ups:
        values = up.values.float()
        reduced = u[:, up.offset : up.offset + values.shape[1]].contiguous()
        total[:, up.first : up.first + len(values)] += _product(reduced, values)
    return total


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply with bits that do not depend on the number of rows."""
    count = len(weight)
    wide = weight if count >= MIN_COLUMNS else with_rows(weight, MIN_COLUMNS)
    return fixed_product(x.device, x, wide)[:, :count]


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
        self._records: dict[torch.device, torch.Tensor] = {}
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

    def at(self, site: int, device: torch.device) -> Site:
        """Return the changes of a projection for the kernels of a device."""
        if device not in self._records:
            self._records[device] = torch.stack(
                [adapter.records(device)[1] for adapter in self.adapters]
            )
        width = max((adapter.width(site) for adapter in self.adapters), default=0)
        return Site(self._groups_at(site, device), self._records[device][:, site], width)

    def _groups_at(self, site: int, device: torch.device) -> Groups:
        """Return the groups of rows, in which rows that a site's changes leave alone have none."""
        key = device, tuple(site in adapter.by_site for adapter in self.adapters)
        if key not in self._groups:
            adapters = [
                adapter if adapter >= 0 and key[1][adapter] else -1 for adapter in self.of_rows
            ]
            # A few of many rows have the bits of many: a few alone take another kernel.
            least = MOST_ROWS + 1 if len(adapters) > MOST_ROWS else 0
            self._groups[key] = Groups.of(adapters, device, least)
        return self._groups[key]

    def few(self, site: int, x: torch.Tensor, norm: torch.Tensor | None = None) -> Reduced | None:
        """Compute u of a few rows; None if no row is changed.

        Args:
            site: the projection.
            x: `[T, K]`, its input.
            norm: `[K]`, weight of a zero-centred RMS norm whose factor of each row is left to the
                reader, as in `few_rows`; None: no norm.
        """
        return _reduced(x.device, x, norm, self.at(site, x.device)) if self.reaches(site) else None

    def experts(self, sites: tuple[int, int], device: torch.device) -> ExpertSites | None:
        """Return the changes of experts in one piece; None if those of no row are changed."""
        if not any(map(self.reaches, sites)):
            return None
        return ExpertSites(*(self.at(site, device) for site in sites))

    def groups(
        self, site: int, device: torch.device
    ) -> Iterator[tuple[LowRankChange | None, torch.Tensor]]:
        """Yield each change of a projection with its rows, on a device; None: rows that stay as
        they are."""
        by_adapter: dict[int, list[int]] = {}
        for row, adapter in enumerate(self.of_rows):
            known = adapter >= 0 and site in self.adapters[adapter].by_site
            by_adapter.setdefault(adapter if known else -1, []).append(row)
        for adapter, rows in by_adapter.items():
            change = None if adapter < 0 else self.adapters[adapter].at(site, device)
            yield change, torch.tensor(rows, device=device)

    def reaches(self, site: int) -> bool:
        """Tell whether the adapter of any row changes a projection."""
        return any(site in self.adapters[adapter].by_site for adapter in self._used)

    def changed(self, sites: Sequence[int]) -> list[bool]:
        """Tell for each row whether its adapter changes any of these projections."""
        known = [any(site in adapter.by_site for site in sites) for adapter in self.adapters]
        return [adapter >= 0 and known[adapter] for adapter in self.of_rows]

    def added(self, weight: Linear, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Add the changes by the adapters of x's rows to products in float32, in place."""
        first = 0
        for leaf in weight.leaves():
            columns = slice(first, first + leaf.columns)
            first = columns.stop
            if by_kernels(x.device):
                if (u := self.few(leaf.site, x)) is not None:
                    own = out[:, columns]
                    extended(x.device, own, own, Epilogue(), u)
                continue
            for change, rows in self.groups(leaf.site, x.device):
                if change is not None:
                    out[rows, columns] += addition_of(change, x[rows], leaf.columns)
        return out

    def multiplied(
        self, weight: Linear, x: torch.Tensor, after: Epilogue, *, deterministic: bool
    ) -> torch.Tensor:
        """Compute a call of a projection of one format, with checked arguments."""
        if by_kernels(x.device):
            u = _reduced(x.device, x, None, self.at(weight.site, x.device))
            # Rows with an adapter may need `plus` once more.
            return weight.with_change(x, after._replace(overwrite=False), deterministic, u)
        out = x.new_empty(x.shape[0], weight.columns)
        for change, place in self.groups(weight.site, x.device):
            mine = after.of(itemgetter(place))
            if change is None:
                out[place] = weight._multiply(x[place], mine, deterministic)
                continue
            wide = weight.partial(x[place], deterministic=True)
            wide = wide + addition_of(change, x[place], weight.columns)
            out[place] = followed(wide, mine).to(x.dtype)
        return out

    def gated(
        self, gate: Linear, up: Linear, x: torch.Tensor, *, deterministic: bool
    ) -> torch.Tensor:
        """Compute `gate.gated`; rows whose adapters change neither have the bits that they have
        without adapters."""
        changed = self.changed([leaf.site for part in (gate, up) for leaf in part.leaves()])
        if not any(changed):
            return gate.gated(up, x, deterministic=deterministic)
        out = x.new_empty(x.shape[0], gate.columns)
        for kind in (True, False):
            kind_rows = torch.tensor(
                [row for row, row_changed in enumerate(changed) if row_changed is kind]
            )
            if not len(kind_rows):
                continue
            place = kind_rows.to(x.device)
            if kind:
                mine, rows = self.kept(kind_rows), x[place]
                both = (
                    part(rows, deterministic=deterministic, changes=mine) for part in (gate, up)
                )
                out[place] = silu_times(*both)
            else:
                out[place] = gate.gated(up, x[place], deterministic=deterministic)
        return out
