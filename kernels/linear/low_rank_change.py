"""An adapter's change of one projection, by torch, and its record for a GPU's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear.low_rank_host import hold
from vlm_serve.kernels.linear.low_rank_records import KINDS, MOST_PARTS, RECORD
from vlm_serve.kernels.linear.torch_dense import MIN_COLUMNS, in_tiles, with_rows


@dataclass(frozen=True, slots=True)
class Up:
    """Adjacent columns that one module changes: from `first` on, by `values`, `[n, rank]`. Their
    elements of u begin at `offset`."""

    first: int
    offset: int
    values: torch.Tensor


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Change:
    """An adapter's change of one projection.

    Attributes:
        down: `[all ranks, depth]`, the factors A of its modules, stacked.
        scales: float32, one per row of `down`.
        ups: in ascending order of columns.
    """

    down: torch.Tensor
    scales: torch.Tensor
    ups: tuple[Up, ...]

    def to(self, device: torch.device) -> Change:
        """Return the same change with its factors on a device."""
        ups = tuple(replace(up, values=up.values.to(device)) for up in self.ups)
        return Change(self.down.to(device), self.scales.to(device), ups)

    @property
    def width(self) -> int:
        """Elements of u."""
        return len(self.down)

    @property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        return self.down.nbytes + self.scales.nbytes + sum(up.values.nbytes for up in self.ups)

    def of(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        """Return float32 `[T, columns]`, the sum that x's rows get."""
        u = _product(x.float(), self.down.float()) * self.scales
        total = u.new_zeros(len(x), columns)
        for up in self.ups:
            values = up.values.float()
            own = u[:, up.offset : up.offset + values.shape[1]].contiguous()
            total[:, up.first : up.first + len(values)] += _product(own, values)
        return total


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply with bits that do not depend on the number of rows."""
    count = len(weight)
    wide = weight if count >= MIN_COLUMNS else with_rows(weight, MIN_COLUMNS)
    return in_tiles(x, lambda rows, _: F.linear(rows, wide))[:, :count]


def records_of(changes: Mapping[int, Change | StackedChange], sites: int) -> torch.Tensor:
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


def _record(change: Change | StackedChange) -> list[int]:
    down, ups = change.down, change.ups
    if len(ups) > MOST_PARTS:
        raise KernelArgumentError("change", f"{len(ups)} parts, at most {MOST_PARTS}")
    if wrong := {each.dtype for each in (down, *(up.values for up in ups))} - KINDS.keys():
        raise KernelArgumentError("change", f"factors in {wrong.pop()}")
    numbers = [down.data_ptr(), change.scales.data_ptr(), change.width, KINDS[down.dtype]]
    numbers += [len(ups), change.places.data_ptr() if isinstance(change, StackedChange) else 0]
    for up in ups:
        count, rank = up.values.shape[-2:]
        numbers += [up.first, up.first + count, up.offset, rank]
        numbers += [up.values.data_ptr(), KINDS[up.values.dtype]]
    numbers += [0] * (RECORD - len(numbers))
    hold(numbers, change)
    return numbers


@dataclass(frozen=True, slots=True, weakref_slot=True)
class StackedChange:
    """An adapter's changes of n experts with weights in one piece.

    Attributes:
        down: `[n, all ranks, depth]`, the factors A of an expert's modules, stacked.
        scales: float32 `[n, all ranks]`.
        ups: of gate and up, or of down; values are `[n, columns, rank]`, and the rank is 0 where
            no expert is changed. Missing ranks are zeros.
        places: int32, of each of the model's experts in the above; -1: it stays as it is.
    """

    down: torch.Tensor
    scales: torch.Tensor
    ups: tuple[Up, ...]
    places: torch.Tensor

    def to(self, device: torch.device) -> StackedChange:
        """Return the same changes with their factors on a device."""
        ups = tuple(replace(up, values=up.values.to(device)) for up in self.ups)
        down, scales, places = (each.to(device) for each in (self.down, self.scales, self.places))
        return StackedChange(down, scales, ups, places)

    @property
    def width(self) -> int:
        """Elements of u."""
        return self.down.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all factors and of the places."""
        factors = (self.down, self.scales, self.places, *(up.values for up in self.ups))
        return sum(each.nbytes for each in factors)

    def of_expert(self, expert: int) -> Change | None:
        """Return an expert's own change; None if it stays as it is."""
        place = int(self.places[expert])
        if place < 0:
            return None
        ups = tuple(replace(up, values=up.values[place]) for up in self.ups)
        return Change(self.down[place], self.scales[place], ups)
