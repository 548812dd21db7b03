"""Builds a step's batch from its slices and the registered sequences."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from vlm_serve.engine.requests.plan import SequenceInfo, Slice
from vlm_serve.engine.steps.sampler import SequenceSampler
from vlm_serve.kernels.linear.low_rank import AdapterChanges, RowChanges
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta, VerifyMeta
from vlm_serve.models.batch import ForwardBatch


class KnownSequence:
    """A registered sequence with all later additions.

    Attributes:
        table: physical KV blocks. Batches refer to it: it changes between steps only.
        sampler: samples its tokens.
        mtp_cleared_until: the MTP layer skipped the last tokens, and its KV is zero up to this
            position; 0 if it skipped none.
    """

    def __init__(self, info: SequenceInfo) -> None:
        self.info = info
        self.table = array("i")
        self.sampler = SequenceSampler(info)
        self.mtp_cleared_until = 0

    def take(self, item: Slice) -> None:
        """Apply the new data of a slice. The operation is idempotent."""
        assert item.first_block <= len(self.table), "a table with a hole"
        del self.table[item.first_block :]
        self.table.extend(item.blocks)
        # The sampler learns of drafts only when they are accepted.
        certain = item.token_ids[:1] if item.kind == "verify" else item.token_ids
        self.sampler.replace(max(0, item.start - len(self.info.token_ids)), certain)

    def token_ids(self, item: Slice) -> tuple[int, ...]:
        """Return all tokens of a slice."""
        return self.info.token_ids[item.start : item.end] + item.token_ids

    def positions(self, start: int, end: int) -> torch.Tensor:
        """Return the positions of prompt and generated tokens, `[3, end - start]`, see `Prompt`."""
        info, known = self.info, len(self.info.token_ids)
        prompt = info.positions[:, start:end]
        if end <= known:
            return prompt
        later = torch.arange(max(start, known), end).to(info.positions.dtype) + info.rope_delta
        return torch.cat((prompt, later.expand(3, -1)), dim=1)


Known = Mapping[int, KnownSequence]


def make_batch(
    packed: Sequence[Slice],
    known: Known,
    embeddings: Mapping[int, torch.Tensor],
    block_size: int,
    adapters: Mapping[int, AdapterChanges] = MappingProxyType({}),
) -> tuple[ForwardBatch, list[int]]:
    """Build the step's batch on the host; return it with the row of the logits for every sample.

    Args:
        packed: slices already applied to their sequences: decode tokens, prefills, drafts.
        known: sequences by number.
        embeddings: media embeddings by slot.
        block_size: tokens per KV block.
        adapters: the adapters of slots.
    """
    token_ids: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    task_rows: list[int] = []
    media: list[tuple[int, torch.Tensor]] = []
    wants_experts = greedy = False
    for item in packed:
        sequence, offset = known[item.sequence], len(token_ids) - item.start
        token_ids.extend(sequence.token_ids(item))
        slots.extend(_slots(item, sequence.table, block_size))
        for first, last, slot, row in item.embeddings:
            media.append((offset + first, embeddings[slot][row : row + last - first]))
        logit_rows.extend(range(offset + item.reported_start, offset + item.reported_end))
        if item.kind == "verify":
            task_rows.extend(range(len(logit_rows), len(logit_rows) + len(item.samples)))
            logit_rows.extend(range(offset + item.start, len(token_ids)))
        elif item.samples or item.kind == "decode":
            # Every decode token has a row: captured steps have one for each.
            task_rows.extend([len(logit_rows)] * len(item.samples))
            logit_rows.append(len(token_ids) - 1)
        wants_experts |= sequence.info.params.return_routed_experts
        greedy |= bool(item.samples) and sequence.sampler.is_plain
    decodes = [item for item in packed if item.kind == "decode"]
    prefills = [item for item in packed if item.kind == "prefill"]
    drafts = [item for item in packed if item.kind == "verify"]
    batch = ForwardBatch(
        token_ids=_tensor(token_ids),
        positions=_positions(decodes, prefills + drafts, known),
        slots=_tensor(slots),
        decode=_decode_meta(decodes, known) if decodes else None,
        prefill=_prefill_meta(prefills, known) if prefills else None,
        media=tuple(media),
        logit_rows=_tensor(logit_rows),
        capture_experts=wants_experts,
        greedy=greedy,
        verify=_verify_meta(drafts, known) if drafts else None,
        changes=_row_changes(packed, adapters),
    )
    return batch, task_rows


def _row_changes(
    packed: Sequence[Slice], adapters: Mapping[int, AdapterChanges]
) -> RowChanges | None:
    """Return the adapters of the step's tokens; None if no slice has one."""
    used = sorted({item.adapter for item in packed} - {-1})
    if not used:
        return None
    index = {slot: place for place, slot in enumerate(used)} | {-1: -1}
    rows = [index[item.adapter] for item in packed for _ in range(item.start, item.end)]
    return RowChanges([adapters[slot] for slot in used], rows, used)


def _tensor(values: list[int]) -> torch.Tensor:
    """Convert to an int64 tensor, via an array: torch takes several times as long for a list."""
    if not values:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(array("q", values), dtype=torch.int64)


def _slots(item: Slice, table: Sequence[int], size: int) -> list[int]:
    unwritten = max(0, min(item.end, item.write_start) - item.start)
    slots = [-1] * unwritten
    for position in range(item.start + unwritten, item.end):
        slots.append(table[position // size] * size + position % size)
    return slots


def _positions(decodes: list[Slice], others: list[Slice], known: Known) -> torch.Tensor:
    parts = [known[item.sequence].positions(item.start, item.end) for item in others]
    if decodes:
        ahead = [item.start + known[item.sequence].info.rope_delta for item in decodes]
        parts.insert(0, torch.from_numpy(np.array(3 * ahead)).view(3, -1))
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _decode_meta(decodes: list[Slice], known: Known) -> DecodeMeta:
    return DecodeMeta(
        block_tables=tuple([known[item.sequence].table for item in decodes]),
        kv_lens=tuple([item.end for item in decodes]),
        src_rows=tuple([item.src_row for item in decodes]),
        dst_rows=tuple([item.dst_row for item in decodes]),
        snapshot_rows=tuple([item.snapshots[0][1] if item.snapshots else -1 for item in decodes]),
    )


def _prefill_meta(prefills: list[Slice], known: Known) -> PrefillMeta:
    cu_seqlens = [0]
    chunk_ends = []
    snapshots: list[tuple[int, int, int]] = []
    for index, item in enumerate(prefills):
        offset = cu_seqlens[-1] - item.start
        cu_seqlens.append(offset + item.end)
        chunk_ends.append(tuple([end + offset for end in item.chunk_ends]))
        chunk_of = {end: chunk for chunk, end in enumerate(item.chunk_ends)}
        snapshots.extend((index, chunk_of[position], row) for position, row in item.snapshots)
    return PrefillMeta(
        cu_seqlens=tuple(cu_seqlens),
        starts=tuple([item.start for item in prefills]),
        block_tables=tuple([known[item.sequence].table for item in prefills]),
        src_rows=tuple([item.src_row for item in prefills]),
        dst_rows=tuple([item.dst_row for item in prefills]),
        chunk_ends=tuple(chunk_ends),
        snapshots=tuple(snapshots),
    )


def _verify_meta(drafts: list[Slice], known: Known) -> VerifyMeta:
    cu_seqlens = [0]
    for item in drafts:
        cu_seqlens.append(cu_seqlens[-1] + item.end - item.start)
    return VerifyMeta(
        cu_seqlens=tuple(cu_seqlens),
        starts=tuple([item.start for item in drafts]),
        block_tables=tuple([known[item.sequence].table for item in drafts]),
        rows=tuple([item.dst_row for item in drafts]),
        updates=tuple([item.updates for item in drafts]),
        folded=tuple([item.pending for item in drafts]),
    )
