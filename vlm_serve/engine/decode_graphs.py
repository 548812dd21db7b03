"""Replays decode steps from CUDA graphs, captured once at start-up for padded batch sizes.

A decode step of a small batch is a few hundred short launches. A host queues them more slowly than
a GPU runs them; a graph queues them all at once. A graph replays fixed addresses and grid sizes. So
a step's inputs go into fixed buffers (`decode_buffers`), and its batch is padded to the next
captured size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import replace
from typing import NotRequired, Protocol, TypedDict, Unpack

import torch

from vlm_serve.engine.adapters.table import AdapterTable
from vlm_serve.engine.decode_buffers import DecodeBuffers, DecodeLimits
from vlm_serve.engine.graph_device import GraphDevice, Step, largest_first
from vlm_serve.engine.step_tables import HostRing, TableMemory
from vlm_serve.kernels.checks import (
    check_block_tables,
    check_decode_meta,
    check_prefill_meta,
    check_verify_meta,
)
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors

LARGEST = 256
"""Decoding sequences beside prompts, at most. Larger such batches keep a GPU busy without graphs,
and each row keeps its logits."""
DENSE = 256
"""Up to here a batch is padded to a multiple of 8. Above, to one of four sizes an octave: a fifth
of a step is padding at most, and a graph takes seconds and memory."""


def padded_sizes(most: int) -> tuple[int, ...]:
    """Return the batch sizes to capture, ascending, for steps of up to `most` sequences."""
    sizes, size = [1, 2, 4, *range(8, DENSE, 8)], DENSE
    while size < most:
        sizes += range(size, 2 * size, size // 4)
        size *= 2
    return (*(size for size in sizes if size < most), most)


class StepBuffers(Protocol):
    """Inputs of captured steps."""

    def fill(self, batch: ForwardBatch | None) -> None:
        """Write a step; None writes padding alone."""
        ...


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
        max_num_seqs: maximum number of sequences in a step.
        device: captures steps and copies their tables.
        deterministic: of the steps, see `ForwardBatch`; others have no graph. False by default.
        results: of all kinds, since an engine runs one step at a time. By default each has its own.
    """

    block_size: int
    max_model_len: int
    max_num_seqs: int
    device: GraphDevice
    deterministic: NotRequired[bool]
    results: NotRequired[StepResults]


class StepGraphs(ABC):
    """Common base of captured steps.

    Args:
        model: the model to capture.
        caches: pools; the last state row, if any, is a scratch row for padding.
        most_logits: rows of logits of the largest step.
        most_tokens: its tokens; a model with an MTP layer reports their hidden states.
        limits: see `StepLimits`.
    """

    _adapters: AdapterTable | None = None

    def __init__(
        self,
        model: Model,
        caches: CacheTensors,
        *,
        most_logits: int,
        most_tokens: int,
        **limits: Unpack[StepLimits],
    ) -> None:
        self._deterministic = limits.get("deterministic", False)
        block_size, device = limits["block_size"], limits["device"]
        self._num_blocks, self._block_size = caches.num_blocks, block_size
        # Rows of sequences; the next one is the scratch row. A model without state has neither, and
        # 0 disables the checks of rows.
        self._num_rows = max(caches.num_rows - 1, 0)
        blocks = -(-limits["max_model_len"] // block_size)
        self._limits = DecodeLimits(block_size, blocks, self._num_rows)
        self._ring = HostRing(device)
        results = limits.get("results")
        if results is None:
            results = StepResults(model, most_logits, most_tokens, caches.device)
        assert len(results.logits) >= most_logits, "too few rows for the logits of a step"
        assert results.hidden is None or len(results.hidden) >= most_tokens
        self._logits, self._hidden = results.logits, results.hidden
        self._model, self._caches, self._device = model, caches, device

    def hold_changes(self, slot: int, changes: AdapterChanges | None) -> None:
        """Put an adapter's changes into a slot, between steps; None: empty it."""
        if self._adapters is not None:
            self._adapters.hold(slot, changes)

    @abstractmethod
    def run(self, batch: ForwardBatch) -> ForwardOutput | None:
        """Run the step from a graph; return None if no graph fits. The next run of a kind with
        the same results overwrites the logits and hidden states.

        Args:
            batch: a step, its tensors on the host.

        Raises:
            KernelArgumentError: a row, update or block outside of the pools, as from the kernels.
        """

    def _captured(self, batch: ForwardBatch, packed: torch.Tensor | None = None) -> Step:
        """Capture the forward of a batch; its logits and hidden states go into shared buffers.

        Args:
            batch: a step of this size.
            packed: places of its tokens in their order; None: they have no padding between them.
        """
        batch = replace(batch, deterministic=self._deterministic)

        def step() -> None:
            output = self._model.forward(batch, self._caches)
            self._logits[: output.logits.shape[0]].copy_(output.logits)
            hidden = output.hidden
            if hidden is not None and self._hidden is not None:
                hidden = hidden if packed is None else hidden[packed]
                self._hidden[: hidden.shape[0]].copy_(hidden)

        return self._device.capture(step)

    def _replay(self, buffers: StepBuffers, step: Step, batch: ForwardBatch) -> ForwardOutput:
        """Check the rows and blocks of a batch, run its captured step, and return the results."""
        place = self._num_blocks, self._block_size
        if (decode := batch.decode) is not None:
            alone = batch.prefill is None and batch.verify is None
            count = batch.token_ids.shape[0] if alone else len(decode)
            check_decode_meta(decode, count, self._num_rows)
            check_block_tables(decode, decode.kv_lens, *place)
        if (prefill := batch.prefill) is not None:
            check_prefill_meta(prefill, prefill.num_tokens, self._num_rows)
            check_block_tables(prefill, prefill.kv_lens, *place)
        if (verify := batch.verify) is not None:
            updates = self._caches.num_updates
            check_verify_meta(verify, verify.num_tokens, self._num_rows, updates)
            check_block_tables(verify, verify.kv_lens, *place)
        buffers.fill(batch)
        step()
        hidden = None if self._hidden is None else self._hidden[: batch.token_ids.shape[0]]
        return ForwardOutput(self._logits[: batch.logit_rows.shape[0]], hidden=hidden)


class DecodeGraphs(StepGraphs):
    """Runs decode-only steps from captured graphs.

    Args:
        model, caches, limits: see `StepGraphs`.
        adapters: those of slots, for which there is a second set of graphs; None: a step with
            adapters has none.
    """

    def __init__(
        self,
        model: Model,
        caches: CacheTensors,
        *,
        adapters: AdapterTable | None = None,
        **limits: Unpack[StepLimits],
    ) -> None:
        self._sizes = padded_sizes(limits["max_num_seqs"])
        self._adapters = adapters
        super().__init__(
            model,
            caches,
            most_logits=self._sizes[-1],
            most_tokens=self._sizes[-1],
            **limits,
        )
        self._steps = self._set(None)
        self._changed = {} if adapters is None else self._set(adapters)

    def _set(self, adapters: AdapterTable | None) -> dict[int, tuple[DecodeBuffers, Step]]:
        """Capture a graph for every size. All share the largest one's tables."""
        device = self._caches.device
        memory = TableMemory(device)

        def captured(size: int) -> tuple[DecodeBuffers, Step]:
            buffers = DecodeBuffers(size, self._limits, self._ring, device, adapters, memory)
            return buffers, self._captured(buffers.batch)

        return dict(zip(self._sizes, largest_first(self._sizes, captured), strict=True))

    def _accepts(self, batch: ForwardBatch) -> bool:
        """Return True if a graph can run this step: decode tokens only, one row of logits for each,
        adapters of slots only, no routed experts, and no more sequences than captured."""
        return (
            batch.prefill is None
            and batch.deterministic == self._deterministic
            and batch.verify is None
            and (batch.changes is None or self._adapters is not None)
            and batch.decode is not None
            and not batch.media
            and not batch.capture_experts
            and len(batch.decode) == batch.logit_rows.shape[0] <= self._sizes[-1]
        )

    def run(self, batch: ForwardBatch) -> ForwardOutput | None:
        meta = batch.decode
        if not self._accepts(batch):
            return None
        assert meta is not None
        size = self._sizes[bisect_left(self._sizes, len(meta))]
        steps = self._steps if batch.changes is None else self._changed
        return self._replay(*steps[size], batch)
