"""Batches of steps that only extend the one before: their columns live from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vlm_serve.engine.requests.plan import ChangedBlocks, DecodeRows
from vlm_serve.engine.steps.batching import Known
from vlm_serve.kernels.linear.low_rank import AdapterChanges, RowChanges
from vlm_serve.kernels.metadata import DecodeMeta
from vlm_serve.models.batch import ForwardBatch

_SPARE = 16
"""Columns of block tables in advance."""


class RowColumns:
    """What is known of the sequences that decode together, a place each.

    Args:
        rows: the first step of these sequences.
        known: registered sequences by number.
        block_size: tokens per KV block.

    Attributes:
        numbers: the sequences; see `DecodeRows.sequences`.
        samplers: of each sequence, by number.
        is_plain: all are sampled greedily and without log-probabilities.
    """

    def __init__(self, rows: DecodeRows, known: Known, block_size: int) -> None:
        self.numbers = rows.sequences
        found = [known[number] for number in rows.sequences]
        self.samplers = {each.info.sequence: each.sampler for each in found}
        self.is_plain = all(sampler.is_plain for sampler in self.samplers.values())
        self._penalised = [
            (place, each.sampler) for place, each in enumerate(found) if each.sampler.is_penalised
        ]
        self._size = block_size
        self._tables = tuple([each.table for each in found])
        self._used = max(map(len, self._tables))
        self._table = np.zeros((len(found), self._used + _SPARE), np.int32)
        for place, table in enumerate(self._tables):
            self._table[place, : len(table)] = table
        self._deltas = np.array([each.info.rope_delta for each in found])
        self._places = np.arange(len(found))
        self._logit_rows = torch.arange(len(found))
        self._state_rows = tuple(rows.state_rows.tolist())
        self._none = (-1,) * len(found)

    def batch(self, rows: DecodeRows, adapters: Mapping[int, AdapterChanges]) -> ForwardBatch:
        """Return the batch of a step of these sequences, on the host; ids that only the device
        knows are 0."""
        self._take(rows.blocks)
        blocks = self._table[self._places, rows.starts // self._size].astype(np.int64)
        positions = torch.from_numpy(rows.starts + self._deltas)
        return ForwardBatch(
            token_ids=self._token_ids(rows),
            positions=positions.expand(3, -1).contiguous(),
            slots=torch.from_numpy(blocks * self._size + rows.starts % self._size),
            logit_rows=self._logit_rows,
            decode=DecodeMeta(
                block_tables=self._tables,
                kv_lens=tuple((rows.starts + 1).tolist()),
                src_rows=self._state_rows,
                dst_rows=self._state_rows,
                snapshot_rows=self._snapshot_rows(rows),
                table=self._table[:, : self._used],
            ),
            greedy=self.is_plain and not rows.masks,
            changes=_changes(rows.adapters, adapters),
        )

    def note(self, rows: DecodeRows) -> None:
        """Tell the samplers that count tokens of those that the host knows."""
        for place, sampler in self._penalised if rows.tokens is not None else ():
            assert rows.tokens is not None
            sampler.replace(int(rows.positions[place]) - 1, (int(rows.tokens[place]),))

    def _take(self, changed: Sequence[ChangedBlocks]) -> None:
        """Replace the ends of some tables."""
        for place, first, blocks in changed:
            table, end = self._tables[place], first + len(blocks)
            assert first <= len(table), "a table with a hole"
            del table[first:]
            table.extend(blocks)
            self._used = max(self._used, end)
            if end > self._table.shape[1]:
                self._table = np.pad(self._table, ((0, 0), (0, end + _SPARE)))
            self._table[place, first:end] = blocks

    def _token_ids(self, rows: DecodeRows) -> torch.Tensor:
        if rows.tokens is None:
            return torch.zeros(len(rows), dtype=torch.int64)
        return torch.from_numpy(rows.tokens)

    def _snapshot_rows(self, rows: DecodeRows) -> tuple[int, ...]:
        if not rows.snapshots:
            return self._none
        found = dict(rows.snapshots)
        return tuple([found.get(place, -1) for place in range(len(rows))])


def _changes(
    slots: Sequence[int] | None, adapters: Mapping[int, AdapterChanges]
) -> RowChanges | None:
    """Return the adapters of rows by their slots; None if no row has one."""
    if slots is None:
        return None
    used = sorted(set(slots) - {-1})
    index = {slot: place for place, slot in enumerate(used)} | {-1: -1}
    return RowChanges([adapters[slot] for slot in used], [index[slot] for slot in slots], used)
