"""Load task of a rank, as data: for the engine's own rank and all others."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vlm_serve.engine.numerics.arithmetic import Arithmetic, Types
from vlm_serve.engine.steps.local_executor import LocalExecutor
from vlm_serve.engine.steps.memory import MemoryPlan
from vlm_serve.engine.steps.step_paths import compile_steps
from vlm_serve.kernels.large_pages import own_arenas
from vlm_serve.kernels.ranks import ALONE, GroupRanks, Ranks, SharedRanks
from vlm_serve.kernels.ranks.shared import SharedMemory
from vlm_serve.models import Model, ModelSpec, load_model
from vlm_serve.models.cache_layout import CacheTensors
from vlm_serve.models.config import Changes
from vlm_serve.system.host_memory import retain_freed_memory


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Place where ranks meet.

    Attributes:
        file: shared memory, or the store of a process group.
        slot_bytes: size of a slot in shared memory; 0 for a process group.
        limit: seconds that ranks wait for each other.
    """

    file: Path
    slot_bytes: int
    limit: float

    def join(self, rank: int, size: int, device: torch.device, threads: int) -> Ranks:
        """Join as one of `size` ranks."""
        if not self.slot_bytes:
            return GroupRanks(rank, size, self.file, device, limit=self.limit)
        memory = SharedMemory(self.file, size, self.slot_bytes)
        return SharedRanks(rank, memory, limit=self.limit, threads=threads)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model to load, with its arithmetic and device; see `load_model`."""

    path: Path
    spec: ModelSpec
    arithmetic: Arithmetic
    device: torch.device
    compiled: bool
    drafts: bool = False
    changes: Changes = field(default_factory=Changes)
    pooled: tuple[int, ...] | int | None = None
    keeps_files: bool = True

    def load(self, ranks: Ranks = ALONE, **given: Any) -> Model:
        """Load a rank's part of the model. Raise whatever loading raises.

        Args:
            given: further options of `load_model`.
        """
        # Weights that may leave share no memory with pools, which stay.
        with nullcontext() if self.keeps_files else own_arenas():
            return self._load(ranks, given)

    def load_beside(self, model: Model, path: Path, tensors: Mapping[str, torch.Tensor]) -> Model:
        """Load the rank's part of other weights than those that are served, of the same spec, and
        bind it to the same pools. Arguments: see `load_model`."""
        other = replace(self, path=path)
        loaded = other.load(model.ranks, spec=model.spec, tensors=tensors)
        loaded.bind_like(model)
        return loaded

    def _load(self, ranks: Ranks, given: dict[str, Any]) -> Model:
        return load_model(
            self.path,
            self.arithmetic.types.weights,
            self.device,
            compute_dtype=self.arithmetic.types.compute,
            compiled=self.compiled,
            ranks=ranks,
            drafts=self.drafts,
            bits=self.arithmetic.bits,
            dynamic=self.arithmetic.dynamic,
            changes=self.changes,
            pooled=self.pooled,
            keeps_files=self.keeps_files,
            **given,
        )


@dataclass(frozen=True, slots=True)
class RankTask:
    """Load task of one rank.

    Attributes:
        source: the model, on this rank's device.
        threads: number of threads for the model.
    """

    rank: int
    size: int
    rendezvous: Rendezvous
    source: ModelSource
    threads: int

    def load(self) -> Model:
        """Load the rank's part of the model. Raise whatever loading raises."""
        device = self.source.device
        if device.type == "cpu":
            torch.set_num_threads(self.threads)
            retain_freed_memory()
        return self.source.load(self.rendezvous.join(self.rank, self.size, device, self.threads))


@dataclass(frozen=True, slots=True)
class Pools:
    """Pool sizes of every rank and settings of its executor; see `LocalExecutor`."""

    types: Types
    num_blocks: int
    num_rows: int
    num_updates: int
    block_size: int
    deterministic: bool

    @classmethod
    def of(cls, types: Types, memory: MemoryPlan, num_rows: int, *, deterministic: bool) -> Pools:
        """Take the sizes from a memory plan. The number of rows is given, since a plan has no
        scratch rows."""
        return cls(
            types,
            memory.num_blocks,
            num_rows,
            memory.num_updates,
            memory.block_size,
            deterministic,
        )

    def allocate(self, model: Model) -> CacheTensors:
        """Allocate a rank's share of the pools."""
        return model.spec.cache_layout(model.ranks.size, mtp=model.drafts).allocate(
            self.num_blocks,
            self.num_rows,
            self.block_size,
            self.types.pools,
            model.device,
            num_updates=self.num_updates,
        )

    def follower(self, model: Model) -> LocalExecutor:
        """Create the executor that follows the first rank's steps."""
        caches = self.allocate(model)
        if model.compiled:
            compile_steps(model, caches)
        return LocalExecutor(
            model, caches, block_size=self.block_size, deterministic=self.deterministic
        )
