"""Replays short passes of the multi-token-prediction layer from CUDA graphs.

The layer reads a few tokens of each sequence, then drafts one token after the other. Every sequence
has a place of fixed size in the first pass, and one token in each later one. A later pass takes its
tokens and hidden states from the pass before, on the device: the host waits for nothing between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Unpack

import torch

from vlm_serve.engine.steps.step_buffers import (
    index_table,
    place_tables,
    places_of,
    runs_of,
    token_tables,
    write_places,
    write_tokens,
)
from vlm_serve.engine.steps.step_graphs import StepLimits
from vlm_serve.engine.steps.step_sizes import SequenceLimits, StepSize
from vlm_serve.engine.steps.step_tables import (
    HostRing,
    Step,
    StepTables,
    TableMemory,
    Tables,
    largest_first,
    size_of,
)
from vlm_serve.kernels.checks import check_block_tables
from vlm_serve.kernels.metadata import DecodeMeta
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors
from vlm_serve.models.mtp import FIRST_KEY


class DraftBuffers:
    """Inputs of a pass at fixed addresses.

    Args:
        size: its places, see `pass_sizes`.
        limits, ring, device, memory: see `StepBuffers`.

    Attributes:
        batch: argument of the model; its tokens are decode tokens of the layer.
        places: int64 `[size.rows]`, which of the packed tokens lies there; 0 for padding.
    """

    def __init__(
        self,
        size: StepSize,
        limits: SequenceLimits,
        ring: HostRing,
        device: torch.device,
        memory: TableMemory | None = None,
    ) -> None:
        self.size, self._limits = size, limits
        self._tables = StepTables(_parts(size, limits), ring, device, memory)
        fixed, none = self._tables.fixed, (-1,) * size.rows
        self.places = fixed["places"]["rows"]
        self.batch = ForwardBatch(
            token_ids=fixed["tokens"]["token_ids"],
            positions=fixed["tokens"]["positions"],
            slots=fixed["tokens"]["slots"],
            decode=DecodeMeta(
                block_tables=((0,) * limits.max_blocks,) * size.rows,
                kv_lens=(limits.longest,) * size.rows,
                src_rows=none,
                dst_rows=none,
                snapshot_rows=none,
                tensors=dict(fixed["keys"]),
            ),
            logit_rows=fixed["logits"]["rows"],
        )
        self.fill(None)

    def accepts(self, batch: ForwardBatch) -> bool:
        """Return True if the sequences and tokens of a batch for `Model.draft` fit."""
        meta = batch.prefill
        return (
            meta is not None
            and not batch.media
            and len(meta) <= self.size.drafted
            and max(end - begin for begin, end in pairwise(meta.cu_seqlens)) <= self.size.room
            and max(_key_slots(batch)) <= self._limits.longest
        )

    def fill(self, batch: ForwardBatch | None) -> None:
        """Write a batch that `accepts` allows, its tensors on the host; None writes padding
        alone."""
        staged = self._tables.stage()
        if batch is not None:
            assert batch.prefill is not None
            meta, size = batch.prefill, self.size
            runs = runs_of(meta.cu_seqlens, size.room)
            write_tokens(staged["tokens"], batch, runs)
            starts = [start + FIRST_KEY for start in meta.starts]
            offsets, blocks = meta.cu_seqlens, meta.block_tables
            write_places(staged["keys"], size, self._limits, starts, offsets, blocks)
            packed = places_of(runs)
            staged["places"]["rows"][packed] = torch.arange(len(packed))
            staged["logits"]["rows"][: len(batch.logit_rows)] = packed[batch.logit_rows]
        self._tables.send()


def _parts(size: StepSize, limits: SequenceLimits) -> Mapping[str, Tables]:
    """Return the tables of a pass."""
    return {
        "tokens": token_tables(size.rows),
        "keys": place_tables(size, limits, least=FIRST_KEY + 1),
        "places": index_table(size.rows),
        "logits": index_table(size.drafted),
    }


def _key_slots(batch: ForwardBatch) -> Sequence[int]:
    """Return the number of slots up to each sequence's last key."""
    assert batch.prefill is not None
    return [length + FIRST_KEY for length in batch.prefill.kv_lens]


class DraftGraphs:
    """Runs short passes of the layer from captured graphs.

    Args:
        model, caches, limits: see `StepGraphs`; the model has the layer.
        sizes: of the passes, ascending by their rows, see `pass_sizes`.

    Attributes:
        best: int64, a row for each sequence of the largest pass, the last pass's drafts: the first
            ones, as many as it made.
    """

    def __init__(
        self,
        model: Model,
        caches: CacheTensors,
        sizes: Sequence[StepSize],
        **limits: Unpack[StepLimits],
    ) -> None:
        self._model, self._caches, self._device = model, caches, limits["device"]
        self._deterministic = limits.get("deterministic", False)
        on, block_size = caches.device, limits["block_size"]
        rows, most = max(size.rows for size in sizes), max(size.drafted for size in sizes)
        states = torch.zeros(rows + most, model.spec.hidden_size, dtype=model.dtype)
        self._before, self._hidden = torch.split(states.to(on), [rows, most])
        self.best = torch.zeros(most, dtype=torch.int64, device=on)
        self._logits = torch.empty(most, model.spec.vocab_size, device=on)
        room = SequenceLimits(block_size, -(-limits["max_model_len"] // block_size), 0)
        ring, memory = HostRing(self._device), TableMemory(on)
        # The pass with the most tokens is not the one with the most sequences.
        memory.first(max(size_of(_parts(size, room)) for size in sizes))

        def captured(size: StepSize, *, later: bool) -> tuple[DraftBuffers, Step]:
            buffers = DraftBuffers(size, room, ring, on, memory)
            return buffers, self._captured(buffers, later=later)

        name = "a draft pass of {}"
        self._first = largest_first(sizes, partial(captured, later=False), name)
        single = [size for size in sizes if size.room == 1]
        self._later = largest_first(single, partial(captured, later=True), name)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, before: torch.Tensor) -> ForwardOutput | None:
        """Run a pass from a graph; return None if no graph fits. The next run overwrites the
        results.

        Args:
            batch: argument of `Model.draft`, its tensors on the host.
            before: its other argument.

        Raises:
            KernelArgumentError: a block outside of the pools, as from the kernels.
        """
        captured = next((graph for graph in self._first if graph[0].accepts(batch)), None)
        if captured is None:
            return None
        self._before[: len(before)].copy_(before)
        return self._replay(captured, batch)

    @torch.inference_mode()
    def run_later(self, batch: ForwardBatch) -> ForwardOutput:
        """Run the pass that reads the last pass's drafts, of as many sequences in the same order.

        Args:
            batch: one token of each sequence; its ids are not read.

        Raises:
            KernelArgumentError: as from `run`.
        """
        return self._replay(next(graph for graph in self._later if graph[0].accepts(batch)), batch)

    def _replay(self, captured: tuple[DraftBuffers, Step], batch: ForwardBatch) -> ForwardOutput:
        assert batch.prefill is not None
        place = self._caches.num_blocks, self._caches.block_size
        check_block_tables(batch.prefill, _key_slots(batch), *place)
        buffers, step = captured
        buffers.fill(batch)
        step()
        count = len(batch.logit_rows)
        return ForwardOutput(self._logits[:count], hidden=self._hidden[:count])

    def _captured(self, buffers: DraftBuffers, *, later: bool) -> Step:
        count = buffers.size.drafted
        batch = replace(buffers.batch, deterministic=self._deterministic)
        if later:
            batch = replace(batch, token_ids=self.best[:count])

        def step() -> None:
            source = self._hidden if later else self._before
            output = self._model.draft(batch, source[buffers.places], self._caches)
            assert output.hidden is not None
            self._logits[:count].copy_(output.logits)
            self._hidden[:count].copy_(output.hidden)
            self.best[:count].copy_(output.logits.argmax(-1))

        return self._device.capture(step)
