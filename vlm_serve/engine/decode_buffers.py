"""Inputs of a decode step at fixed addresses, for captured graphs.

A step's sequences are followed by padding up to the captured size. Padding is harmless. It starts
from zero state, leaves its state in a scratch row that no sequence reads, attends to the first key
of the first sequence, and writes no K and V. It reads no uninitialised memory, so it stays finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vlm_serve.engine.adapters.table import AdapterTable
from vlm_serve.engine.step_tables import HostRing, Shapes, StepTables, TableMemory
from vlm_serve.kernels.linear.low_rank_fixed import fill_changes, shapes_of
from vlm_serve.kernels.metadata import DecodeMeta
from vlm_serve.models.batch import ForwardBatch

_PER_SEQUENCE = ("kv_lens", "src_rows", "dst_rows", "snapshot_rows")


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Limits of the sequences in every step.

    Attributes:
        block_size: tokens per KV block.
        max_blocks: blocks of the longest sequence.
        scratch_row: state row that padding writes to; any number without state layers.
    """

    block_size: int
    max_blocks: int
    scratch_row: int


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """Tables of `size` decoding sequences, padding included."""

    size: int
    limits: DecodeLimits

    @property
    def shapes(self) -> Shapes:
        """Types and shapes; all are int32."""
        return {
            **dict.fromkeys(_PER_SEQUENCE, (torch.int32, (self.size,))),
            "block_tables": (torch.int32, (self.size, self.limits.max_blocks)),
        }

    def meta(self, fixed: Mapping[str, torch.Tensor]) -> DecodeMeta:
        """Return the arguments of ops. Their host values are the maximum of all steps, since they
        size grids and scratch memory. The values of a step are in tensors only."""
        size, limits = self.size, self.limits
        return DecodeMeta(
            block_tables=((0,) * limits.max_blocks,) * size,
            kv_lens=(limits.max_blocks * limits.block_size,) * size,
            src_rows=(-1,) * size,
            dst_rows=tuple(range(size)),
            snapshot_rows=(-1,) * size,
            tensors=dict(fixed),
        )

    def fill(
        self, staged: Mapping[str, torch.Tensor], meta: DecodeMeta | None, instead: int = 0
    ) -> None:
        """Write at most `size` sequences, or none, followed by padding. Padding attends to the
        first key of the first sequence, or without any, of the block `instead`."""
        count = 0 if meta is None else len(meta)
        if meta is not None:
            for name in _PER_SEQUENCE:
                staged[name][:count] = torch.tensor(getattr(meta, name))
        staged["kv_lens"][count:] = 1
        staged["src_rows"][count:] = -1
        staged["dst_rows"][count:] = self.limits.scratch_row
        staged["snapshot_rows"][count:] = -1
        tables, lengths = ((), ()) if meta is None else (meta.block_tables, meta.kv_lens)
        fill_blocks(staged["block_tables"], tables, lengths, self.limits, instead)


def fill_blocks(
    staged: torch.Tensor,
    tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    limits: DecodeLimits,
    instead: int,
) -> None:
    """Write the blocks that cover each sequence's keys, followed by padding: the first block of the
    first sequence, or `instead` if there is none."""
    staged.zero_()
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        used = -(-length // limits.block_size)
        staged[row].numpy()[:used] = table[:used]
    staged[len(tables) :, 0] = tables[0][0] if tables else instead


@dataclass(frozen=True, slots=True)
class TokenTables:
    """Token ids, positions and slots of `size` tokens; a slot of -1 is written nowhere."""

    size: int

    @property
    def shapes(self) -> Shapes:
        """Types and shapes; all are int64, see `ForwardBatch`."""
        return {
            "token_ids": (torch.int64, (self.size,)),
            "positions": (torch.int64, (3, self.size)),
            "slots": (torch.int64, (self.size,)),
        }

    def fill(
        self,
        staged: Mapping[str, torch.Tensor],
        batch: ForwardBatch | None,
        *places: tuple[slice, int],
    ) -> None:
        """Write runs of a batch's tokens, each to a given place; the rest is padding."""
        staged["token_ids"].zero_()
        staged["positions"].zero_()
        staged["slots"].fill_(-1)
        if batch is None:
            return
        for run, first in places:
            own = slice(first, first + run.stop - run.start)
            staged["token_ids"][own] = batch.token_ids[run]
            staged["positions"][:, own] = batch.positions[:, run]
            staged["slots"][own] = batch.slots[run]


class DecodeBuffers:
    """Inputs of a decode step of exactly `size` sequences, padding included.

    Args:
        size, limits: see `DecodeTables`.
        ring, device, memory: see `StepTables`.
        adapters: of the sequences' slots; None: they have none.

    Attributes:
        batch: argument of the model.
    """

    def __init__(
        self,
        size: int,
        limits: DecodeLimits,
        ring: HostRing,
        device: torch.device,
        adapters: AdapterTable | None = None,
        memory: TableMemory | None = None,
    ) -> None:
        self._tokens, self._decode = TokenTables(size), DecodeTables(size, limits)
        parts = {"tokens": self._tokens.shapes, "decode": self._decode.shapes}
        if adapters is not None:
            parts["changes"] = shapes_of(size, adapters.sizes.slots)
        self._tables = StepTables(parts, ring, device, memory)
        fixed = self._tables.fixed
        self.batch = ForwardBatch(
            token_ids=fixed["tokens"]["token_ids"],
            positions=fixed["tokens"]["positions"],
            slots=fixed["tokens"]["slots"],
            decode=self._decode.meta(fixed["decode"]),
            prefill=None,
            media=(),
            logit_rows=torch.arange(size, device=device),
            changes=None if adapters is None else adapters.rows(fixed["changes"]),
        )
        self.fill(None)

    def fill(self, batch: ForwardBatch | None) -> None:
        """Write a decode step of at most `size` sequences, its tensors on the host; None writes
        padding alone."""
        decode = None if batch is None else batch.decode
        staged = self._tables.stage()
        self._tokens.fill(staged["tokens"], batch, (slice(0, len(decode) if decode else 0), 0))
        self._decode.fill(staged["decode"], decode)
        if "changes" in staged:
            fill_changes(staged["changes"], None if batch is None else batch.changes)
        self._tables.send()
