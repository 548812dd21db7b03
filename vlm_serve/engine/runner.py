"""Computes what the scheduler planned: encode, copy, forward, sample. It decides nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
import torch

from vlm_serve.cache.experts import Rows
from vlm_serve.engine.decode_graphs import DecodeGraphs
from vlm_serve.engine.plan import Encode, PromptLogprobs, Slice, StepOutput, StepPlan
from vlm_serve.engine.sampler import prompt_logprobs, sample
from vlm_serve.kernels.dispatch import launching_on
from vlm_serve.kernels.kv_write import copy_kv_rows
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta
from vlm_serve.kernels.state_copy import copy_rows
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors


class ModelRunner:
    """Runs step plans on one device.

    Args:
        model: the language model with its vision tower.
        caches: KV and state pools.
        block_size: tokens per KV block.
        deterministic: see `ForwardBatch.deterministic`.
        poison: fill freed blocks and rows with NaN (tests).
        graphs: what runs the decode-only steps that it accepts, instead of the model's forward.

    Attributes:
        model_seconds: how long the model itself worked in the last step (on a GPU: until its
            launches were queued).
    """

    def __init__(
        self,
        model: Model,
        caches: CacheTensors,
        *,
        block_size: int,
        deterministic: bool = False,
        poison: bool = False,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._caches = caches
        self._block_size = block_size
        self._deterministic = deterministic
        self._graphs = graphs
        self._embeddings: dict[int, torch.Tensor] = {}
        self.poison = poison
        self.model_seconds = 0.0

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Executes one step. Raises whatever the model raises; nothing is published before it
        has returned."""
        with launching_on(self._caches.device):
            return self._run(plan)

    def _run(self, plan: StepPlan) -> StepOutput:
        for slot in plan.dropped_slots:
            self._embeddings.pop(slot, None)
        self.model_seconds = 0.0
        self._copy(plan)
        self._encode(plan.encodes)
        decodes = [item for item in plan.slices if not item.prefill]
        prefills = [item for item in plan.slices if item.prefill]
        batch, tasks_rows = self._batch(decodes, prefills)
        begin = time.perf_counter()
        output = self._forward(batch)
        self.model_seconds += time.perf_counter() - begin
        tasks = [task for item in (*decodes, *prefills) for task in item.samples]
        reports = _prompt_reports(output.logits, (*decodes, *prefills))
        sampled = sample(output.logits, tasks, tasks_rows)
        return StepOutput(
            {task.sequence: one for task, one in zip(tasks, sampled, strict=True)},
            _experts_by_sequence(output.experts, (*decodes, *prefills)),
            reports,
        )

    def _forward(self, batch: ForwardBatch) -> ForwardOutput:
        if self._graphs is not None and self._graphs.accepts(batch):
            return self._graphs.run(batch)
        return self._model.forward(batch.to(self._caches.device), self._caches)

    def poison_freed(self, blocks: Iterable[int], rows: Iterable[int]) -> None:
        """Fills freed blocks and rows with NaN, so that a stale read shows in every result."""
        caches = self._caches
        for pools, freed in (
            (caches.of_unit("block"), list(blocks)),
            (caches.of_unit("row"), list(rows)),
        ):
            for pool in pools:
                if freed and pool.dtype.is_floating_point:
                    pool[freed] = float("nan")

    def _copy(self, plan: StepPlan) -> None:
        if plan.row_copies:
            sources, destinations = zip(*plan.row_copies, strict=True)
            copy_rows(self._caches.of_unit("row"), sources, destinations)
        if plan.copies:
            copy_kv_rows(self._caches["kv"], self._caches.tensors.get("kv_scales"), plan.copies)

    def _encode(self, encodes: tuple[Encode, ...]) -> None:
        if not encodes:
            return
        patches = [encode.item.patches(encode.patch) for encode in encodes]
        grids = [(1, encode.item.grid[1], encode.item.grid[2]) for encode in encodes]
        begin = time.perf_counter()
        embeddings = self._model.encode_media(
            torch.cat(patches), grids, deterministic=self._deterministic
        )
        self.model_seconds += time.perf_counter() - begin
        for encode, embedding in zip(encodes, embeddings, strict=True):
            self._embeddings[encode.slot] = embedding

    def _batch(self, decodes: list[Slice], prefills: list[Slice]) -> tuple[ForwardBatch, list[int]]:
        """The step's batch, on the host, and for every sample its row of the logits."""
        token_ids: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        task_rows: list[int] = []
        media: list[tuple[int, torch.Tensor]] = []
        for item in (*decodes, *prefills):
            offset = len(token_ids) - item.start
            token_ids.extend(item.token_ids)
            slots.extend(self._slots(item))
            for first, last, slot, row in item.embeddings:
                embedding = self._embeddings[slot][row : row + last - first]
                media.append((offset + first, embedding))
            logit_rows.extend(range(offset + item.start, offset + item.reported_end))
            if item.samples:
                task_rows.extend([len(logit_rows)] * len(item.samples))
                logit_rows.append(len(token_ids) - 1)
        batch = ForwardBatch(
            token_ids=torch.tensor(token_ids),
            positions=_positions(decodes, prefills),
            slots=torch.tensor(slots),
            decode=_decode_meta(decodes) if decodes else None,
            prefill=_prefill_meta(prefills) if prefills else None,
            media=tuple(media),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
            deterministic=self._deterministic and bool(prefills),
            capture_experts=any(item.experts for item in (*decodes, *prefills)),
        )
        return batch, task_rows

    def _slots(self, item: Slice) -> list[int]:
        size = self._block_size
        table = item.block_table
        unwritten = max(0, min(item.end, item.write_start) - item.start)
        slots = [-1] * unwritten
        for position in range(item.start + unwritten, item.end):
            slots.append(table[position // size] * size + position % size)
        return slots


def _prompt_reports(
    logits: torch.Tensor, packed: Iterable[Slice]
) -> dict[int, list[PromptLogprobs]]:
    """Log-probabilities of prompt tokens, from the rows that `_batch` asked for."""
    reports, row = {}, 0
    for item in packed:
        if item.prompt_logprobs is not None:
            following = item.prompt.token_ids[item.start + 1 : item.reported_end + 1]
            rows = logits[row : row + len(following)]
            reports[item.sequence] = prompt_logprobs(rows, following, item.prompt_logprobs)
            row += len(following)
        row += bool(item.samples)
    return reports


def _experts_by_sequence(experts: torch.Tensor | None, packed: Iterable[Slice]) -> dict[int, Rows]:
    """Splits the rows of a step's packed tokens; one copy to the host for all of them."""
    if experts is None:
        return {}
    rows: Rows = experts.cpu().numpy()
    if rows.dtype == np.int16:
        rows = rows.view(np.uint16)
    split, first = {}, 0
    for item in packed:
        last = first + item.end - item.start
        split[item.sequence] = rows[first:last]
        first = last
    return split


def _positions(decodes: list[Slice], prefills: list[Slice]) -> torch.Tensor:
    parts = []
    if decodes:
        ahead = torch.tensor([item.start + item.prompt.rope_delta for item in decodes])
        parts.append(ahead.expand(3, -1))
    for item in prefills:
        known = len(item.prompt)
        if item.start < known:
            parts.append(item.prompt.positions[:, item.start : min(item.end, known)])
        if item.end > known:
            # Tokens generated before a preemption, computed again as part of the prompt.
            first = max(item.start, known) + item.prompt.rope_delta
            parts.append(torch.arange(first, item.end + item.prompt.rope_delta).expand(3, -1))
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _decode_meta(decodes: list[Slice]) -> DecodeMeta:
    return DecodeMeta(
        block_tables=tuple(item.block_table for item in decodes),
        kv_lens=tuple(item.end for item in decodes),
        src_rows=tuple(item.src_row for item in decodes),
        dst_rows=tuple(item.dst_row for item in decodes),
        snapshot_rows=tuple(item.snapshots[0][1] if item.snapshots else -1 for item in decodes),
    )


def _prefill_meta(prefills: list[Slice]) -> PrefillMeta:
    cu_seqlens = [0]
    chunk_ends = []
    snapshots: list[tuple[int, int, int]] = []
    for index, item in enumerate(prefills):
        offset = cu_seqlens[-1] - item.start
        cu_seqlens.append(offset + item.end)
        chunk_ends.append(tuple(end + offset for end in item.chunk_ends))
        chunk_of = {end: chunk for chunk, end in enumerate(item.chunk_ends)}
        snapshots.extend((index, chunk_of[position], row) for position, row in item.snapshots)
    return PrefillMeta(
        cu_seqlens=tuple(cu_seqlens),
        starts=tuple(item.start for item in prefills),
        block_tables=tuple(item.block_table for item in prefills),
        src_rows=tuple(item.src_row for item in prefills),
        dst_rows=tuple(item.dst_row for item in prefills),
        chunk_ends=tuple(chunk_ends),
        snapshots=tuple(snapshots),
    )
