"""The adapters of a captured step's rows: which they are stands in tables on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vlm_serve.kernels.elementwise import silu_times
from vlm_serve.kernels.linear.base import Linear
from vlm_serve.kernels.linear.low_rank import RowChanges
from vlm_serve.kernels.linear.low_rank_records import Groups, Tiles
from vlm_serve.kernels.linear.low_rank_rows import GroupedRows


class FixedRows(RowChanges):
    """Rows with adapters from tables on the device.

    Every projection with elements of u may be changed.

    Args:
        records: int64 `[slots, sites + 1, RECORD]`, see `records_of`.
        widths: most elements of u, by site.
        tables: `shapes_of`, on the device.
        kept: those of the rows whose logits a step computes; None: it keeps all rows in their
            places, as a decode step does.
    """

    def __init__(
        self,
        records: torch.Tensor,
        widths: Sequence[int],
        tables: Mapping[str, torch.Tensor],
        kept: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__((), ())
        self._kept = None if kept is None else FixedRows(records, widths, kept)
        self._widths = widths
        groups = Groups(tables["order"], tables["bounds"], tables["adapters"])
        self._fixed = GroupedRows(records, widths.__getitem__, lambda _: groups)

    def kept(self, rows: torch.Tensor) -> RowChanges:
        return self if self._kept is None else self._kept

    def grouped(self, device: torch.device) -> GroupedRows:
        return self._fixed

    def reaches(self, site: int) -> bool:
        return self._widths[site] > 0

    def gated(
        self, gate: Linear, up: Linear, x: torch.Tensor, *, deterministic: bool
    ) -> torch.Tensor:
        both = (each(x, deterministic=deterministic, changes=self) for each in (gate, up))
        return silu_times(*both)


def shapes_of(rows: int, slots: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return types and shapes of the tables of so many rows, see `Groups`."""
    return {
        "order": (torch.int32, (rows,)),
        "bounds": (torch.int32, (Tiles.most(rows, slots), 3)),
        "adapters": (torch.int32, (rows,)),
    }


def fill_changes(
    staged: Mapping[str, torch.Tensor],
    changes: RowChanges | None,
    runs: Sequence[tuple[slice, int]] | None = None,
) -> None:
    """Write the adapters of a step's rows by their slots; other rows are padding.

    Args:
        staged: `shapes_of`, to fill completely.
        changes: of the rows; None: there are no rows.
        runs: rows of `changes`, and where the first of them lies, ascending; None: they come
            first.
    """
    of_rows = [] if changes is None else changes.of_rows
    slots = [] if changes is None else [*changes.slots, -1]
    adapters = [slots[each] for each in of_rows]
    if runs is not None and adapters:
        packed, adapters = adapters, list[int]()
        for run, first in runs:
            adapters += [-1] * (first - len(adapters))
            adapters += packed[run]
    tiles = Tiles.of(adapters)
    staged["adapters"].fill_(-1)
    staged["adapters"].numpy()[: len(adapters)] = adapters
    staged["order"].zero_().numpy()[: len(tiles.order)] = tiles.order
    staged["bounds"].zero_().numpy()[: len(tiles.bounds)] = tiles.bounds or 0
