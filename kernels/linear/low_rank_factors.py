"""Low-rank changes as a GPU's kernels find them: addresses of factors, and rows by adapter.

An adapter has a record for each projection, in one table for all adapters of a step. Rows are
sorted by adapter and cut into tiles, each of one adapter. So a kernel reads an adapter's factors
once for many rows, and rows of several adapters take one launch.

What the kernels compute stands here by torch too: the check at start compares them with it. A
record names its factors by their addresses, and those that are held are found by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.triton_support import to_device

HEAD, PART, MOST_PARTS = 6, 6, 8
"""Numbers of a record: those at its beginning, those of a part, and its most parts."""
RECORD = HEAD + PART * MOST_PARTS
FIRST_UP = HEAD + 4
"""Place of the address of the first part's B."""
TILE = 16
"""Rows of a tile, the smallest dot."""
RANKS = 16
"""Elements of u computed at a time."""
SPAN = 1024
"""Depth of a part of the sums."""
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Number of a factor's dtype in a record."""


@dataclass(frozen=True, slots=True)
class Up:
    """Adjacent columns that one module changes: from `first` on, by `values`, `[n, rank]`. Their
    elements of u begin at `offset`."""

    first: int
    offset: int
    values: torch.Tensor


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LowRankChange:
    """An adapter's change of one projection, or those of n experts whose weights lie in one piece.

    Attributes:
        down: `[all ranks, depth]`, the factors A of its modules, stacked; `[n, all ranks, depth]`
            of experts.
        scales: float32, one per row of `down`.
        ups: in ascending order of columns. Those of experts are of gate and up, or of down; their
            values are `[n, columns, rank]`, and the rank is 0 where no expert is changed. Missing
            ranks are zeros.
        places: int32, of each of the model's experts in the above; -1: it stays as it is. None: the
            change is of one projection.
    """

    down: torch.Tensor
    scales: torch.Tensor
    ups: tuple[Up, ...]
    places: torch.Tensor | None = None

    def to(self, device: torch.device) -> LowRankChange:
        """Return the same change with its factors on a device."""
        ups = tuple(replace(up, values=up.values.to(device)) for up in self.ups)
        places = None if self.places is None else self.places.to(device)
        return LowRankChange(self.down.to(device), self.scales.to(device), ups, places)

    @property
    def width(self) -> int:
        """Elements of u."""
        return self.down.shape[-2]

    @property
    def factor_bytes(self) -> int:
        """Bytes of A and B."""
        return self.down.nbytes + sum(up.values.nbytes for up in self.ups)

    @property
    def nbytes(self) -> int:
        """Bytes of all factors, of scales and of places."""
        places = 0 if self.places is None else self.places.nbytes
        return self.factor_bytes + self.scales.nbytes + places

    def of_expert(self, expert: int) -> LowRankChange | None:
        """Return an expert's own change; None if it stays as it is."""
        assert self.places is not None, "of one projection"
        place = int(self.places[expert])
        if place < 0:
            return None
        ups = tuple(replace(up, values=up.values[place]) for up in self.ups)
        return LowRankChange(self.down[place], self.scales[place], ups)


_held: WeakValueDictionary[tuple[int, int], LowRankChange] = WeakValueDictionary()
"""Changes in use, by addresses of their records."""


def records_of(changes: Mapping[int, LowRankChange], sites: int) -> torch.Tensor:
    """Return an adapter's records, int64 `[sites + 1, RECORD]`, on the host.

    A record has the address of A, that of the scales, the elements of u (0: no change), the kind
    of A, the number of parts, and the address of a table of places (0: none). A part has its first
    column, the one behind its last, the place of its elements of u, their number, the address of B
    and its kind. Of several experts' changes, A, scales and B are those of one behind another's,
    and the table has the place of each of the model's experts.

    Args:
        changes: by sites, on the device of the kernels. They must outlive the records.
        sites: of the model.

    Raises:
        KernelArgumentError: too many parts, or factors in a dtype that kernels do not read.
    """
    table = torch.zeros(sites + 1, RECORD, dtype=torch.int64)
    for site, change in changes.items():
        table[site] = torch.tensor(_record(change))
    return table


def _record(change: LowRankChange) -> list[int]:
    down, ups = change.down, change.ups
    if len(ups) > MOST_PARTS:
        raise KernelArgumentError("change", f"{len(ups)} parts, at most {MOST_PARTS}")
    if wrong := {factor.dtype for factor in (down, *(up.values for up in ups))} - KINDS.keys():
        raise KernelArgumentError("change", f"factors in {wrong.pop()}")
    numbers = [down.data_ptr(), change.scales.data_ptr(), change.width, KINDS[down.dtype]]
    numbers += [len(ups), 0 if change.places is None else change.places.data_ptr()]
    for up in ups:
        count, rank = up.values.shape[-2:]
        numbers += [up.first, up.first + count, up.offset, rank]
        numbers += [up.values.data_ptr(), KINDS[up.values.dtype]]
    numbers += [0] * (RECORD - len(numbers))
    _held[numbers[0], numbers[FIRST_UP]] = change
    return numbers


class Tiles(NamedTuple):
    """Rows by adapter.

    Attributes:
        order: rows, those of a tile side by side.
        bounds: of each tile: its first place in `order`, the one behind its last, its adapter.
    """

    order: list[int]
    bounds: list[tuple[int, int, int]]

    @classmethod
    def of(cls, adapters: Sequence[int]) -> Tiles:
        """Sort rows by the number of their adapter, and leave out those of -1."""
        changed = [row for row, adapter in enumerate(adapters) if adapter >= 0]
        order = sorted(changed, key=adapters.__getitem__)
        return cls(order, list(_cut([adapters[row] for row in order])))

    @staticmethod
    def most(rows: int, adapters: int) -> int:
        """Return the most tiles of so many rows with so many adapters."""
        return rows // TILE + min(rows, adapters)


def _cut(adapters: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the tiles of sorted rows."""
    first = 0
    for place in range(1, len(adapters) + 1):
        ends = place == len(adapters) or adapters[place] != adapters[first]
        if ends or place - first == TILE:
            yield first, place, adapters[first]
            first = place


@dataclass(frozen=True)
class Groups:
    """The rows of a step by adapter, on a device.

    Attributes:
        order: int32, see `Tiles`.
        bounds: int32 `[tiles, 3]`; a tile may be empty.
        adapters: int32 `[T]`, the number of each row's adapter, or -1.
        plain: int32, the rows without an adapter, which may have some of the others behind them;
            None if only the device knows them.
    """

    order: torch.Tensor
    bounds: torch.Tensor
    adapters: torch.Tensor
    plain: torch.Tensor | None = None

    @classmethod
    def of(cls, adapters: Sequence[int], device: torch.device, least: int = 0) -> Groups:
        """Send the groups of rows to a device, in one copy.

        Args:
            adapters: of the rows, -1 for none.
            device: of the kernels.
            least: fewest rows of `plain`, unless there are none: some that are changed make up
                for others.
        """
        tiles = Tiles.of(adapters)
        plain = [row for row, adapter in enumerate(adapters) if adapter < 0]
        if plain:
            plain += tiles.order[: max(0, least - len(plain))]
        tables = to_device(
            {
                "order": tiles.order,
                "bounds": [bound for tile in tiles.bounds for bound in tile],
                "adapters": adapters,
                "plain": plain,
            },
            device,
        )
        bounds = tables["bounds"].view(-1, 3)
        return cls(tables["order"], bounds, tables["adapters"], tables["plain"])


class Site(NamedTuple):
    """A projection's changes for the rows of a step.

    Attributes:
        groups: the rows.
        records: int64 `[adapters, RECORD]`, of this projection.
        width: most elements of u.
    """

    groups: Groups
    records: torch.Tensor
    width: int


class ExpertSites(NamedTuple):
    """The changes of experts whose weights lie in one piece: those of gate and up, in parts 0 and
    1, and those of down."""

    gate_up: Site
    down: Site


class Reduced(NamedTuple):
    """The elements of u of rows, for kernels that multiply them by B.

    Attributes:
        u: float32 `[splits, T, width]`, sums over parts of the depth; of rows with an adapter.
        site: the projection.
    """

    u: torch.Tensor
    site: Site


def held(site: Site, adapter: int) -> LowRankChange | None:
    """Return an adapter's change of a projection; None if it leaves that alone.

    Raises:
        KernelArgumentError: nothing in use has the record's addresses.
    """
    record = site.records[adapter].tolist()
    if not record[2]:
        return None
    factors = _held.get((record[0], record[FIRST_UP]))
    if factors is None:
        raise KernelArgumentError("site", "its records are those of factors that are gone")
    return factors


def reduced_by_torch(x: torch.Tensor, norm: torch.Tensor | None, site: Site) -> Reduced:
    """Compute u as `low_rank_triton.reduced`; rows that stay as they are have zeros."""
    if norm is not None:
        x = (x.float() * (1.0 + norm.float())).to(x.dtype)
    splits, width = -(-x.shape[1] // SPAN), -(-site.width // RANKS) * RANKS
    u = torch.zeros(splits, len(x), width, device=x.device)
    for change, rows in changes_at(site):
        down, scales = change.down.to(x.device).float(), change.scales.to(x.device)
        for split in range(splits):
            columns = slice(split * SPAN, (split + 1) * SPAN)
            u[split, rows, : len(down)] = (
                F.linear(x[rows, columns].float(), down[:, columns]) * scales
            )
    return Reduced(u, site)


def addition(change: Reduced, columns: int) -> torch.Tensor:
    """Return float32 `[T, columns]`, what the rows' adapters add to the sums."""
    u = change.u.sum(0)
    total = u.new_zeros(len(u), columns)
    for adapter_change, rows in changes_at(change.site):
        for up in adapter_change.ups:
            values = up.values.to(u.device).float()
            mine = u[rows, up.offset : up.offset + values.shape[1]]
            total[rows, up.first : up.first + len(values)] += F.linear(mine, values)
    return total


def changes_at(site: Site) -> Iterator[tuple[LowRankChange, torch.Tensor]]:
    """Yield each adapter's change of a projection with its rows; none of rows that stay as they
    are."""
    for adapter in range(len(site.records)):
        rows = (site.groups.adapters == adapter).nonzero().flatten()
        change = held(site, adapter) if len(rows) else None
        if change is not None:
            yield change, rows
