"""Addresses of the factors of adapters in slots, at a fixed place for captured steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from vlm_serve.engine.adapters.options import changed_experts, factors_dtype, serves_adapters
from vlm_serve.engine.graph_device import GraphDevice
from vlm_serve.engine.step_tables import HostRing
from vlm_serve.kernels.dispatch import launching_on
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.kernels.linear.low_rank_fixed import FixedRows
from vlm_serve.kernels.linear.low_rank_records import RECORD
from vlm_serve.models.adapters import Modules, without_effect
from vlm_serve.models.adapters.experts import kind_of
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
            own = rows[: len(rows) // modules.stacked.get(number, 1)]
            known = number not in modules.stacked or kind_of(own[0].module) in experts
            widths.append(max_rank * len({each.module for each in own}) if known else 0)
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
        own = self.records[slot]
        staged = self._ring.take()[: own.nbytes].view(torch.int64).view(own.shape)
        if changes is None:
            staged.zero_()
        else:
            staged.copy_(changes.records(self._device)[0])
        with launching_on(self._device):
            self._ring.send(own.view(torch.uint8).flatten())
