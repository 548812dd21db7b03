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

from vlm_serve.engine.decode_buffers import DecodeLimits, TokenTables
from vlm_serve.engine.decode_graphs import StepLimits
from vlm_serve.engine.graph_device import Step, largest_first
from vlm_serve.engine.step_tables import HostRing, Shapes, StepTables, TableMemory, size_of
from vlm_serve.engine.verify_buffers import PlaceTables
from vlm_serve.engine.verify_graphs import LARGEST_ROWS, powers_up_to
from vlm_serve.kernels.checks import check_block_tables
from vlm_serve.kernels.metadata import DecodeMeta
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors
from vlm_serve.models.mtp import FIRST_KEY


def pass_sizes(max_num_seqs: int, drafts: int) -> tuple[tuple[int, int], ...]:
    """Return (sequences, tokens of each) of the passes to capture, ascending by their rows.

    A pass reads one token behind a draft, two behind a decode token, and two more than were drafted
    behind drafts: the verified tokens, and those that were sampled before and behind them.
    """
    found = {
        (count, room)
        for count in powers_up_to(max_num_seqs)
        for room in (1, 2, drafts + 2)
        if count * room <= LARGEST_ROWS or room == 1
    }
    return tuple(sorted(found, key=lambda size: (size[0] * size[1], size)))


class DraftBuffers:
    """Inputs of a pass at fixed addresses.

    Args:
        sequences: number of places.
        room: tokens of a place.
        limits, ring, device, memory: see `DecodeBuffers`.

    Attributes:
        batch: argument of the model; its tokens are decode tokens of the layer.
        places: int64 `[sequences * room]`, which of the packed tokens lies there; 0 for padding.
    """

    def __init__(
        self,
        sequences: int,
        room: int,
        limits: DecodeLimits,
        ring: HostRing,
        device: torch.device,
        memory: TableMemory | None = None,
    ) -> None:
        self.sequences, self.room = sequences, room
        rows = sequences * room
        self._tokens, self._keys = TokenTables(rows), _keys(sequences, room, limits)
        self._tables = StepTables(_parts(sequences, room, limits), ring, device, memory)
        fixed, none = self._tables.fixed, (-1,) * rows
        self.places = fixed["rows"]["places"]
        self.batch = ForwardBatch(
            token_ids=fixed["tokens"]["token_ids"],
            positions=fixed["tokens"]["positions"],
            slots=fixed["tokens"]["slots"],
            decode=DecodeMeta(
                block_tables=((0,) * limits.max_blocks,) * rows,
                kv_lens=(self._keys.longest,) * rows,
                src_rows=none,
                dst_rows=none,
                snapshot_rows=none,
                tensors=dict(fixed["keys"]),
            ),
            prefill=None,
            media=(),
            logit_rows=fixed["rows"]["logits"],
        )
        self.fill(None)

    def accepts(self, batch: ForwardBatch) -> bool:
        """Return True if the sequences and tokens of a batch for `Model.draft` fit."""
        meta = batch.prefill
        return (
            meta is not None
            and not batch.media
            and len(meta) <= self.sequences
            and max(end - begin for begin, end in pairwise(meta.cu_seqlens)) <= self.room
            and max(_key_slots(batch)) <= self._keys.longest
        )

    def fill(self, batch: ForwardBatch | None) -> None:
        """Write a batch that `accepts` allows, its tensors on the host; None writes padding
        alone."""
        meta = None if batch is None else batch.prefill
        slices = [] if meta is None else list(pairwise(meta.cu_seqlens))
        runs = [(slice(begin, end), place * self.room) for place, (begin, end) in enumerate(slices)]
        staged = self._tables.stage()
        self._tokens.fill(staged["tokens"], batch, *runs)
        starts = () if meta is None else meta.starts
        self._keys.fill(
            staged["keys"],
            [
                (start + FIRST_KEY, end - begin)
                for start, (begin, end) in zip(starts, slices, strict=True)
            ],
            () if meta is None else meta.block_tables,
        )
        places, logits = staged["rows"]["places"].zero_(), staged["rows"]["logits"].zero_()
        packed = torch.zeros(slices[-1][1] if slices else 0, dtype=torch.int64)
        for run, first in runs:
            own = torch.arange(first, first + run.stop - run.start)
            packed[run], places[own] = own, torch.arange(run.start, run.stop)
        if batch is not None:
            logits[: len(batch.logit_rows)] = packed[batch.logit_rows]
        self._tables.send()


def _keys(sequences: int, room: int, limits: DecodeLimits) -> PlaceTables:
    return PlaceTables(sequences, room, limits, least=FIRST_KEY + 1)


def _parts(sequences: int, room: int, limits: DecodeLimits) -> Mapping[str, Shapes]:
    """Return the tables of a pass."""
    rows = sequences * room
    return {
        "tokens": TokenTables(rows).shapes,
        "keys": _keys(sequences, room, limits).shapes,
        "rows": {"places": (torch.int64, (rows,)), "logits": (torch.int64, (sequences,))},
    }


def _key_slots(batch: ForwardBatch) -> Sequence[int]:
    """Return the number of slots up to each sequence's last key."""
    assert batch.prefill is not None
    return [length + FIRST_KEY for length in batch.prefill.kv_lens]


class DraftGraphs:
    """Runs short passes of the layer from captured graphs.

    Args:
        model, caches, limits: see `StepGraphs`; the model has the layer.
        drafts: maximum number of drafts per sequence, see `pass_sizes`.

    Attributes:
        best: int64 `[max_num_seqs]`, the last pass's drafts: the first ones, as many as it made.
    """

    def __init__(
        self,
        model: Model,
        caches: CacheTensors,
        *,
        drafts: int,
        **limits: Unpack[StepLimits],
    ) -> None:
        max_num_seqs, block_size = limits["max_num_seqs"], limits["block_size"]
        self._model, self._caches, self._device = model, caches, limits["device"]
        self._deterministic = limits.get("deterministic", False)
        sizes, on = pass_sizes(max_num_seqs, drafts), caches.device
        rows = max(count * room for count, room in sizes)
        states = torch.zeros(rows + max_num_seqs, model.spec.hidden_size, dtype=model.dtype)
        self._before, self._hidden = torch.split(states.to(on), [rows, max_num_seqs])
        self.best = torch.zeros(max_num_seqs, dtype=torch.int64, device=on)
        self._logits = torch.empty(max_num_seqs, model.spec.vocab_size, device=on)
        room = DecodeLimits(block_size, -(-limits["max_model_len"] // block_size), 0)
        ring, memory = HostRing(self._device), TableMemory(on)
        # The pass with the most tokens is not the one with the most sequences.
        memory.first(max(size_of(_parts(*size, room)) for size in sizes))

        def captured(size: tuple[int, int], *, later: bool) -> tuple[DraftBuffers, Step]:
            buffers = DraftBuffers(*size, room, ring, on, memory)
            return buffers, self._captured(buffers, later=later)

        self._first = largest_first(sizes, partial(captured, later=False))
        single = [size for size in sizes if size[1] == 1]
        self._later = largest_first(single, partial(captured, later=True))

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
        found = next((each for each in self._first if each[0].accepts(batch)), None)
        if found is None:
            return None
        self._before[: len(before)].copy_(before)
        return self._replay(found, batch)

    @torch.inference_mode()
    def run_later(self, batch: ForwardBatch) -> ForwardOutput:
        """Run the pass that reads the last pass's drafts, of as many sequences in the same order.

        Args:
            batch: one token of each sequence; its ids are not read.

        Raises:
            KernelArgumentError: as from `run`.
        """
        return self._replay(next(each for each in self._later if each[0].accepts(batch)), batch)

    def _replay(self, found: tuple[DraftBuffers, Step], batch: ForwardBatch) -> ForwardOutput:
        assert batch.prefill is not None
        place = self._caches.num_blocks, self._caches.block_size
        check_block_tables(batch.prefill, _key_slots(batch), *place)
        buffers, step = found
        buffers.fill(batch)
        step()
        count = len(batch.logit_rows)
        return ForwardOutput(self._logits[:count], hidden=self._hidden[:count])

    def _captured(self, buffers: DraftBuffers, *, later: bool) -> Step:
        count = buffers.sequences
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
