"""Inputs of a step with drafted tokens at fixed addresses, for captured graphs.

Every sequence has a place of as many tokens, whatever number of drafts it has. The rest of its
place is padding, as are whole places behind the last sequence. Padding attends to one key. It is
computed behind the real tokens, writes no K and V, and has no update: nothing of it is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from vlm_serve.engine.adapters.table import AdapterTable
from vlm_serve.engine.decode_buffers import DecodeLimits, DecodeTables, TokenTables, fill_blocks
from vlm_serve.engine.step_tables import HostRing, Shapes, StepTables, TableMemory
from vlm_serve.kernels.linear.low_rank_fixed import fill_changes, shapes_of
from vlm_serve.kernels.metadata import DecodeMeta, VerifyMeta
from vlm_serve.models.batch import ForwardBatch

Runs = Sequence[tuple[int, int]]
"""(start, count): positions of consecutive tokens of one sequence."""


@dataclass(frozen=True, slots=True)
class VerifySizes:
    """Maximum sizes of steps.

    Attributes:
        decodes: sequences without drafts.
        sequences: sequences with drafts.
        room: tokens of each of these, its sampled one included.
    """

    decodes: int
    sequences: int
    room: int

    @property
    def rows(self) -> int:
        return self.decodes + self.sequences * self.room


@dataclass(frozen=True, slots=True)
class PlaceTables:
    """Attention's tables for tokens in places of `room` each: keys per token, blocks per place.

    Attributes:
        sequences: number of places.
        room: tokens of a place.
        limits: of the sequences.
        least: number of keys that padding attends to, those that are hidden included.
    """

    sequences: int
    room: int
    limits: DecodeLimits
    least: int = 1

    @property
    def shapes(self) -> Shapes:
        """Types and shapes; all are int32."""
        return {
            "kv_lens": (torch.int32, (self.sequences * self.room,)),
            "block_tables": (torch.int32, (self.sequences, self.limits.max_blocks)),
        }

    @property
    def longest(self) -> int:
        """Keys of the longest sequence."""
        return self.limits.max_blocks * self.limits.block_size

    def fill(
        self,
        staged: Mapping[str, torch.Tensor],
        runs: Runs,
        tables: Sequence[Sequence[int]],
        instead: int = 0,
    ) -> None:
        """Write sequences, followed by padding; `instead`: see `fill_blocks`."""
        lengths = staged["kv_lens"].fill_(self.least)
        for place, (start, count) in enumerate(runs):
            first = place * self.room
            lengths[first : first + count] = torch.arange(start + 1, start + 1 + count)
        ends = [start + count for start, count in runs]
        fill_blocks(staged["block_tables"], tables, ends, self.limits, instead)


@dataclass(frozen=True, slots=True)
class VerifyTables:
    """Tables of sequences with drafts, padding included."""

    sizes: VerifySizes
    limits: DecodeLimits

    @property
    def places(self) -> PlaceTables:
        return PlaceTables(self.sizes.sequences, self.sizes.room, self.limits)

    @property
    def shapes(self) -> Shapes:
        """Types and shapes; all are int32. See `verify_tables`."""
        return {
            **self.places.shapes,
            "slices": (torch.int32, (self.sizes.sequences, 5)),
            "entries": (torch.int32, (self.sizes.sequences * self.sizes.room,)),
        }

    def meta(self, fixed: Mapping[str, torch.Tensor]) -> VerifyMeta:
        """Return the arguments of ops; see `DecodeTables.meta`."""
        sizes, limits = self.sizes, self.limits
        own = range(sizes.sequences)
        return VerifyMeta(
            cu_seqlens=tuple(sizes.room * place for place in range(sizes.sequences + 1)),
            starts=(self.places.longest - sizes.room,) * sizes.sequences,
            block_tables=((0,) * limits.max_blocks,) * sizes.sequences,
            rows=tuple(own),
            updates=tuple(sizes.room * place for place in own),
            folded=(0,) * sizes.sequences,
            tensors=dict(fixed),
        )

    def fill(self, staged: Mapping[str, torch.Tensor], meta: VerifyMeta | None) -> None:
        """Write at most as many sequences as there are places, or none, followed by padding."""
        slices, entries = staged["slices"].zero_(), staged["entries"].fill_(-1)
        slices[:, 3] = torch.arange(0, len(slices) * self.sizes.room, self.sizes.room)
        if meta is None:
            self.places.fill(staged, (), ())
            return
        counts = [end - begin for begin, end in pairwise(meta.cu_seqlens)]
        self.places.fill(staged, list(zip(meta.starts, counts, strict=True)), meta.block_tables)
        for place, (fold, count) in enumerate(zip(meta.folds, counts, strict=True)):
            if fold[0] < 0:  # There is no state.
                continue
            first = place * self.sizes.room
            slices[place, :3], slices[place, 4] = torch.tensor(fold), count
            entries[first : first + count] = torch.arange(fold[1], fold[1] + count)


class VerifyBuffers:
    """Inputs of a step: first those of sequences without drafts, then those of the others.

    Args:
        sizes, limits: of the step.
        ring, device, memory: see `StepTables`.
        adapters: of the sequences' slots; None: they have none.

    Attributes:
        batch: argument of the model. Its logits are those of all tokens in their order, without
            padding between them.
    """

    def __init__(
        self,
        sizes: VerifySizes,
        limits: DecodeLimits,
        ring: HostRing,
        device: torch.device,
        adapters: AdapterTable | None = None,
        memory: TableMemory | None = None,
    ) -> None:
        self._sizes = sizes
        self._tokens = TokenTables(sizes.rows)
        self._decode = DecodeTables(sizes.decodes, limits)
        self._verify = VerifyTables(sizes, limits)
        parts: dict[str, Shapes] = {
            "tokens": self._tokens.shapes,
            "decode": self._decode.shapes if sizes.decodes else {},
            "verify": self._verify.shapes,
            "logits": {"rows": (torch.int64, (sizes.rows,))},
        }
        if adapters is not None:
            # Logits are packed, other rows lie in places.
            changes = shapes_of(sizes.rows, adapters.sizes.slots)
            parts |= {"changes": changes, "kept changes": changes}
        self._tables = StepTables(parts, ring, device, memory)
        fixed = self._tables.fixed
        self.batch = ForwardBatch(
            token_ids=fixed["tokens"]["token_ids"],
            positions=fixed["tokens"]["positions"],
            slots=fixed["tokens"]["slots"],
            decode=self._decode.meta(fixed["decode"]) if sizes.decodes else None,
            prefill=None,
            media=(),
            logit_rows=fixed["logits"]["rows"],
            verify=self._verify.meta(fixed["verify"]),
            changes=None
            if adapters is None
            else adapters.rows(fixed["changes"], fixed["kept changes"]),
        )
        self.fill(None)

    def accepts(self, decode: DecodeMeta | None, verify: VerifyMeta) -> bool:
        """Return True if a step's sequences and drafts fit."""
        sizes = self._sizes
        return (
            (0 if decode is None else len(decode)) <= sizes.decodes
            and len(verify) <= sizes.sequences
            and max(end - begin for begin, end in pairwise(verify.cu_seqlens)) <= sizes.room
            and max(verify.kv_lens) <= self._verify.places.longest
        )

    def fill(self, batch: ForwardBatch | None) -> None:
        """Write a step that `accepts` allows, its tensors on the host; None writes padding
        alone."""
        decode = None if batch is None else batch.decode
        verify = None if batch is None else batch.verify
        decodes, sizes = 0 if decode is None else len(decode), self._sizes
        runs = [(slice(0, decodes), 0)]
        if verify is not None:
            runs += [
                (slice(decodes + begin, decodes + end), sizes.decodes + place * sizes.room)
                for place, (begin, end) in enumerate(pairwise(verify.cu_seqlens))
            ]
        staged = self._tables.stage()
        self._tokens.fill(staged["tokens"], batch, *runs)
        self._verify.fill(staged["verify"], verify)
        if sizes.decodes:
            first = 0 if verify is None else verify.block_tables[0][0]
            self._decode.fill(staged["decode"], decode, first)
        rows = staged["logits"]["rows"].zero_()
        for run, first in runs:
            rows[run] = torch.arange(first, first + run.stop - run.start)
        if "changes" in staged:
            changes = None if batch is None else batch.changes
            fill_changes(staged["changes"], changes, runs)
            fill_changes(staged["kept changes"], changes)
        self._tables.send()
