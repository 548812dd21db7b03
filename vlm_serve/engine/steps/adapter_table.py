"""Adapters of captured steps: addresses of factors by slot, and slots by row, at fixed places."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from vlm_serve.engine.features.adapters.options import changed_experts, serves_adapters
from vlm_serve.engine.numerics.arithmetic import factors_dtype
from vlm_serve.engine.steps.step_tables import GraphDevice, HostRing, Table
from vlm_serve.kernels.dispatch import launching_on
from vlm_serve.kernels.elementwise import silu_times
from vlm_serve.kernels.linear import Linear
from vlm_serve.kernels.linear.low_rank import AdapterChanges, RowChanges
from vlm_serve.kernels.linear.low_rank_factors import RECORD, Groups, Site, Tiles
from vlm_serve.models.adapters import Modules, without_effect
from vlm_serve.models.adapters.changes import kind_of
from vlm_serve.options.config import EngineConfig


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """Room in slots.

    Attributes:
        slots: adapters at a time.
        widths: most elements of u, by site; site 0 is none.
    """

    slots: int
    widths: tuple[int, ...]

    @classmethod
    def of(
        cls, modules: Modules, *, slots: int, max_rank: int, experts: Collection[str] = ()
    ) -> SlotSizes:
        """Return the sizes for a model: u has a part for each module of a projection. It has none
        for experts in one piece, but for those open to adapters."""
        widths = [0]
        for number, (rows, _) in enumerate(modules.sites, 1):
            unstacked = rows[: len(rows) // modules.stacked.get(number, 1)]
            known = number not in modules.stacked or kind_of(unstacked[0].module) in experts
            widths.append(max_rank * len({row.module for row in unstacked}) if known else 0)
        return cls(slots, tuple(widths))

    @classmethod
    def of_config(cls, modules: Modules, config: EngineConfig) -> SlotSizes:
        """Return the sizes of the options."""
        return cls.of(
            modules,
            slots=config.max_loras,
            max_rank=config.max_lora_rank,
            experts=changed_experts(config),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.slots * len(self.widths) * RECORD * 8


RESERVED_RANK = 16
"""Rank of the later adapters for which there is room, as most have. With 64 on all modules, eight
slots of a 27B take 15 GiB of the cache's memory."""


def most_bytes(modules: Modules, config: EngineConfig) -> int:
    """Return the bytes to count for an adapter that is loaded later: all modules have
    `RESERVED_RANK`, and factors the type of the options, or float32. All slots together have room
    for one of the largest rank."""
    dtype, open_to = factors_dtype(config) or torch.float32, changed_experts(config)
    experts = (size for name, size in modules.experts.items() if kind_of(name) in open_to)
    numbers = sum(out + depth for out, depth in (*modules.sizes.values(), *experts))
    rank = min(config.max_lora_rank, RESERVED_RANK)
    rank = max(rank, -(-config.max_lora_rank // config.max_loras))
    return rank * numbers * dtype.itemsize


def idle_adapter(modules: Modules, config: EngineConfig) -> AdapterChanges | None:
    """Return an adapter without effect, to measure and compile steps with; None if the engine
    serves no adapters. Its steps take the memory of those with the largest rank."""
    if not serves_adapters(config):
        return None
    room = SlotSizes.of_config(modules, config).widths
    return without_effect(modules, changed_experts(config), room)


class FixedRows(RowChanges):
    """The adapters of a captured step's rows: which they are stands in tables on the device. Every
    projection with elements of u may be changed.

    Args:
        records: int64 `[slots, sites + 1, RECORD]`, see `records_of`.
        widths: most elements of u, by site.
        tables: `row_tables`, on the device.
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
        self._widths, self._slots = widths, records
        self._fixed = Groups(tables["order"], tables["bounds"], tables["adapters"])

    def kept(self, rows: torch.Tensor) -> RowChanges:
        return self if self._kept is None else self._kept

    def at(self, site: int, device: torch.device) -> Site:
        return Site(self._fixed, self._slots[:, site], self._widths[site])

    def reaches(self, site: int) -> bool:
        return self._widths[site] > 0

    def gated(
        self, gate: Linear, up: Linear, x: torch.Tensor, *, deterministic: bool
    ) -> torch.Tensor:
        both = (linear(x, deterministic=deterministic, changes=self) for linear in (gate, up))
        return silu_times(*both)


def row_tables(rows: int, slots: int) -> dict[str, Table]:
    """Return the tables of the adapters of so many rows, see `Groups`; rows without are padding."""
    return {
        "order": Table(torch.int32, (rows,)),
        "bounds": Table(torch.int32, (Tiles.most(rows, slots), 3)),
        "adapters": Table(torch.int32, (rows,), -1),
    }


def write_changes(
    staged: Mapping[str, torch.Tensor],
    changes: RowChanges | None,
    runs: Sequence[tuple[slice, int]] | None = None,
) -> None:
    """Write the adapters of a step's rows by their slots.

    Args:
        staged: `row_tables`, of padding.
        changes: of the rows; None: there are no rows.
        runs: rows of `changes`, and where the first of them lies, ascending; None: they come
            first.
    """
    of_rows = [] if changes is None else changes.of_rows
    slots = [] if changes is None else [*changes.slots, -1]
    adapters = [slots[index] for index in of_rows]
    if runs is not None and adapters:
        packed, adapters = adapters, list[int]()
        for run, first in runs:
            adapters += [-1] * (first - len(adapters))
            adapters += packed[run]
    tiles = Tiles.of(adapters)
    for name, values in (("adapters", adapters), ("order", tiles.order), ("bounds", tiles.bounds)):
        if values:
            staged[name].numpy()[: len(values)] = values


class AdapterTable:
    """The records of the adapters in slots, on a device. Without an adapter a slot changes nothing.

    Args:
        sizes: of the slots.
        graphs: copies records in the order of steps.
        device: of the table.

    Attributes:
        records: int64 `[slots, sites + 1, RECORD]`.
    """

    def __init__(self, sizes: SlotSizes, graphs: GraphDevice, device: torch.device) -> None:
        self.sizes = sizes
        self._ring, self._device = HostRing(graphs), device
        with torch.inference_mode(False):
            shape = sizes.slots, len(sizes.widths), RECORD
            self.records = torch.zeros(shape, dtype=torch.int64, device=device)
            self._ring.reserve(self.records[0].nbytes)

    def rows(
        self, tables: Mapping[str, torch.Tensor], kept: Mapping[str, torch.Tensor] | None = None
    ) -> FixedRows:
        """Return the adapters of a captured step's rows by its tables, see `FixedRows`."""
        return FixedRows(self.records, self.sizes.widths, tables, kept)

    def hold(self, slot: int, changes: AdapterChanges | None) -> None:
        """Write an adapter's records between steps; None: none."""
        records = self.records[slot]
        staged = self._ring.take()[: records.nbytes].view(torch.int64).view(records.shape)
        if changes is None:
            staged.zero_()
        else:
            staged.copy_(changes.records(self._device)[0])
        with launching_on(self._device):
            self._ring.send(records.view(torch.uint8).flatten())
