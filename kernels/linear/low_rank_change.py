"""An adapter's change of one projection, by torch, and its record for a GPU's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear.low_rank_records import KINDS, MOST_PARTS, RECORD
from vlm_serve.kernels.linear.torch_dense import MIN_COLUMNS, in_tiles, with_rows


@dataclass(frozen=True, slots=True)
class Up:
    """Adjacent columns that one module changes: from `first` on, by `values`, `[n, rank]`. Their
    elements of u begin at `offset`."""

    first: int
    offset: int
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
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


def records_of(changes: Mapping[int, Change], sites: int) -> torch.Tensor:
    """Return an adapter's records, int64 `[sites + 1, RECORD]`, on the host.

    A record has the address of A, that of the scales, the elements of u (0: no change), the kind
    of A, and the number of parts. A part has its first column, the one behind its last, the place
    of its elements of u, their number, the address of B and its kind.

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


def _record(change: Change) -> list[int]:
    down, ups = change.down, change.ups
    if len(ups) > MOST_PARTS:
        raise KernelArgumentError("change", f"{len(ups)} parts, at most {MOST_PARTS}")
    if wrong := {each.dtype for each in (down, *(up.values for up in ups))} - KINDS.keys():
        raise KernelArgumentError("change", f"factors in {wrong.pop()}")
    numbers = [down.data_ptr(), change.scales.data_ptr(), len(down), KINDS[down.dtype], len(ups), 0]
    for up in ups:
        count, rank = up.values.shape
        numbers += [up.first, up.first + count, up.offset, rank]
        numbers += [up.values.data_ptr(), KINDS[up.values.dtype]]
    return numbers + [0] * (RECORD - len(numbers))
