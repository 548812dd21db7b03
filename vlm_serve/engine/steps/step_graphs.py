"""Replays short steps from CUDA graphs, captured once at start-up for padded sizes.

A decode step of a small batch is a few hundred short launches. A host queues them more slowly than
a GPU runs them; a graph queues them all at once. So it is with steps with drafts, and with short
prefills: the rest of a prompt behind a cache hit, or a part of one that leaves time for others. A
graph replays fixed addresses and grid sizes. So a step's inputs go into fixed buffers
(`step_buffers`), and it is padded to the next captured size (`step_sizes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NotRequired, TypedDict, Unpack

import torch

from vlm_serve.engine.steps.adapter_table import AdapterTable
from vlm_serve.engine.steps.step_buffers import StepBuffers, TileForm, tile_forms
from vlm_serve.engine.steps.step_sizes import SequenceLimits, StepSize
from vlm_serve.engine.steps.step_tables import (
    GraphDevice,
    HostRing,
    Step,
    TableMemory,
    largest_first,
    naming,
)
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors


class StepResults:
    """Buffers for the results of captured steps. Graphs with their own would keep all of them.

    Args:
        model: the model.
        most_logits: rows of logits of the largest step.
        most_tokens: its tokens; a model with an MTP layer reports their hidden states.
        device: of the steps.

    Attributes:
        logits: float32 `[most_logits, Model.columns]`.
        hidden: `[most_tokens, hidden]`; None without an MTP layer.
    """

    def __init__(
        self, model: Model, most_logits: int, most_tokens: int, device: torch.device
    ) -> None:
        self.logits = torch.empty(most_logits, model.columns, device=device)
        self.hidden: torch.Tensor | None = None
        if model.drafts:
            shape = most_tokens, model.spec.hidden_size
            self.hidden = torch.empty(shape, dtype=model.dtype, device=device)


class StepLimits(TypedDict):
    """Arguments of all kinds of graphs of an engine.

    Attributes:
        block_size: tokens per KV block.
        max_model_len: longest sequence, in tokens.
        device: captures steps and copies their tables.
        deterministic: of the steps, see `ForwardBatch`; others have no graph. False by default.
        results: of all kinds, since an engine runs one step at a time. By default each has its own.
    """

    block_size: int
    max_model_len: int
    device: GraphDevice
    deterministic: NotRequired[bool]
    results: NotRequired[StepResults]


class StepGraphs:
    """Runs steps of one kind from captured graphs: of decode tokens alone, with drafts or with
    prompts.

    Args:
        model: the model to capture.
        caches: pools; the last state row, if any, is a scratch row for padding.
        sizes: of the kind, ascending by their rows.
        adapters: those of slots, for which there is a second set of graphs; None: a step with
            adapters has none.
        limits: see `StepLimits`.
    """

    def __init__(
        self,
        model: Model,
        caches: CacheTensors,
        sizes: Sequence[StepSize],
        *,
        adapters: AdapterTable | None = None,
        **limits: Unpack[StepLimits],
    ) -> None:
        self._deterministic = limits.get("deterministic", False)
        block_size, device = limits["block_size"], limits["device"]
        # Rows of sequences; the next one is the scratch row. A model without state has neither, and
        # 0 disables the checks of rows.
        self._num_rows = max(caches.num_rows - 1, 0)
        blocks = -(-limits["max_model_len"] // block_size)
        self._limits = SequenceLimits(block_size, blocks, self._num_rows)
        self._ring, self._adapters = HostRing(device), adapters
        most, results = sizes[-1], limits.get("results")
        if results is None:
            results = StepResults(model, most.logits, most.rows, caches.device)
        assert len(results.logits) >= most.logits, "too few rows for the logits of a step"
        assert results.hidden is None or len(results.hidden) >= most.rows
        self._logits, self._hidden = results.logits, results.hidden
        self._model, self._caches, self._device = model, caches, device
        self._forms = self._tile_forms(sizes[0]) if most.prompts else ()
        self._steps = self._set(sizes, None)
        self._changed = [] if adapters is None else self._set(sizes, adapters)

    def _tile_forms(self, size: StepSize) -> tuple[TileForm, ...]:
        """Run a step of padding; return the tile forms that this model's attention uses."""
        batch = StepBuffers(size, self._limits, self._ring, self._caches.device).batch

        def step() -> None:
            self._model.forward(batch, self._caches)

        with naming(f"a step of {size}"):
            self._device.warm_up(step)
        assert batch.prefill is not None
        return tile_forms(batch.prefill.tensors)

    def _set(
        self, sizes: Sequence[StepSize], adapters: AdapterTable | None
    ) -> list[tuple[StepBuffers, Step]]:
        """Capture a graph for every size. All share the largest one's tables."""
        device = self._caches.device
        memory = TableMemory(device)

        def captured(size: StepSize) -> tuple[StepBuffers, Step]:
            buffers = StepBuffers(
                size,
                self._limits,
                self._ring,
                device,
                memory,
                adapters=adapters,
                forms=self._forms,
                packs=bool(size.prompts) and self._model.drafts,
            )
            return buffers, self._captured(buffers)

        return largest_first(sizes, captured)

    def _captured(self, buffers: StepBuffers) -> Step:
        """Capture the forward of a step; its logits and hidden states go into shared buffers."""
        batch = replace(buffers.batch, deterministic=self._deterministic)

        def step() -> None:
            output = self._model.forward(batch, self._caches)
            self._logits[: output.logits.shape[0]].copy_(output.logits)
            hidden, packed = output.hidden, buffers.packed
            if hidden is not None and self._hidden is not None:
                hidden = hidden if packed is None else hidden[packed]
                self._hidden[: hidden.shape[0]].copy_(hidden)

        return self._device.capture(step)

    def hold_changes(self, slot: int, changes: AdapterChanges | None) -> None:
        """Put an adapter's changes into a slot, between steps; None: empty it."""
        if self._adapters is not None:
            self._adapters.hold(slot, changes)

    def _find(self, batch: ForwardBatch) -> tuple[StepBuffers, Step] | None:
        """Find a graph for this step, which must have adapters of slots only, and no media or
        routed experts."""
        if batch.media or batch.capture_experts or batch.deterministic != self._deterministic:
            return None
        steps = self._steps if batch.changes is None else self._changed
        return next((captured for captured in steps if captured[0].accepts(batch)), None)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> ForwardOutput | None:
        """Run the step from a graph; return None if no graph fits. The next run of a kind with
        the same results overwrites the logits and hidden states.

        Args:
            batch: a step, its tensors on the host.

        Raises:
            KernelArgumentError: a row, update or block outside of the pools, as from the kernels.
        """
        captured = self._find(batch)
        return None if captured is None else self._replay(*captured, batch)

    def _replay(self, buffers: StepBuffers, step: Step, batch: ForwardBatch) -> ForwardOutput:
        """Check the rows and blocks of a batch, run its captured step, and return the results."""
        batch.check(self._caches, self._num_rows)
        buffers.fill(batch)
        if batch.sampled is not None:
            self._device.move(buffers.batch.token_ids[: len(batch.sampled)], batch.sampled)
        step()
        hidden = None if self._hidden is None else self._hidden[: batch.token_ids.shape[0]]
        return ForwardOutput(self._logits[: batch.logit_rows.shape[0]], hidden=hidden)
