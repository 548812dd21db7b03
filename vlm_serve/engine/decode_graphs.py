"""Replays decode steps from CUDA graphs, captured once at start-up for padded batch sizes.

A decode step of a small batch is a few hundred short launches. A host queues them more slowly than
a GPU runs them; a graph queues them all at once. A graph replays fixed addresses and grid sizes. So
a step's inputs go into fixed buffers (`decode_buffers`), and its batch is padded to the next
captured size.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

import torch

from vlm_serve.engine.adapters.table import AdapterTable
from vlm_serve.engine.decode_buffers import DecodeBuffers, DecodeLimits
from vlm_serve.engine.graph_device import GraphDevice, Step
from vlm_serve.engine.step_tables import HostRing
from vlm_serve.kernels.checks import check_block_tables, check_decode_meta
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors

LARGEST = 256
"""Larger batches keep a GPU busy without graphs."""


def padded_sizes(most: int) -> tuple[int, ...]:
    """Return the batch sizes to capture, ascending, for steps of up to `most` sequences."""
    most = min(most, LARGEST)
    return tuple(size for size in (1, 2, 4, *range(8, most, 8)) if size < most) + (most,)


class StepGraphs:
    """Common base of captured steps.

    Args:
        model: the model to capture.
        caches: pools; the last state row, if any, is a scratch row for padding.
        block_size: tokens per KV block.
        max_model_len: longest sequence, in tokens.
        most_logits: rows of logits of the largest step.
        device: captures steps and copies their tables.
        deterministic: of the steps, see `ForwardBatch`; others have no graph.
    """

    _adapters: AdapterTable | None = None

    def __init__(
        self,
        model: Model,
        caches: CacheTensors,
        *,
        block_size: int,
        max_model_len: int,
        most_logits: int,
        device: GraphDevice,
        deterministic: bool = False,
    ) -> None:
        self._deterministic = deterministic
        self._num_blocks, self._block_size = caches.num_blocks, block_size
        # Rows of sequences; the next one is the scratch row. A model without state has neither, and
        # 0 disables the checks of rows.
        self._num_rows = max(caches.num_rows - 1, 0)
        self._limits = DecodeLimits(block_size, -(-max_model_len // block_size), self._num_rows)
        self._ring = HostRing(device)
        # Shared by all sizes: graphs with their own logits would keep all of them allocated.
        self._logits = torch.empty(most_logits, model.spec.vocab_size, device=caches.device)
        self._model, self._caches, self._device = model, caches, device

    def hold_changes(self, slot: int, changes: AdapterChanges | None) -> None:
        """Put an adapter's changes into a slot, between steps; None: empty it."""
        if self._adapters is not None:
            self._adapters.hold(slot, changes)

    def _captured(self, batch: ForwardBatch) -> Step:
        """Capture the forward of a batch; its logits go into the shared buffer."""
        batch = replace(batch, deterministic=self._deterministic)

        def step() -> None:
            logits = self._model.forward(batch, self._caches).logits
            self._logits[: logits.shape[0]].copy_(logits)

        return self._device.capture(step)


class DecodeGraphs(StepGraphs):
    """Runs decode-only steps from captured graphs.

    Args:
        model, caches, block_size, max_model_len, device, deterministic: see `StepGraphs`.
        max_num_seqs: maximum number of sequences in a step.
        adapters: those of slots, for which there is a second set of graphs; None: a step with
            adapters has none.
    """

    def __init__(
        self,
        model: Model,
        caches: CacheTensors,
        *,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        device: GraphDevice,
        deterministic: bool = False,
        adapters: AdapterTable | None = None,
    ) -> None:
        self._sizes = padded_sizes(max_num_seqs)
        self._adapters = adapters
        super().__init__(
            model,
            caches,
            block_size=block_size,
            max_model_len=max_model_len,
            most_logits=self._sizes[-1],
            device=device,
            deterministic=deterministic,
        )
        self._steps = self._set(None)
        self._changed = {} if adapters is None else self._set(adapters)

    def _set(self, adapters: AdapterTable | None) -> dict[int, tuple[DecodeBuffers, Step]]:
        """Capture a graph for every size."""
        steps = {}
        # Capture the largest first: the others reuse its memory.
        for size in reversed(self._sizes):
            buffers = DecodeBuffers(size, self._limits, self._ring, self._caches.device, adapters)
            steps[size] = buffers, self._captured(buffers.batch)
        return steps

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
        """Run the step from a graph; return None if no graph fits. The next run overwrites the
        logits.

        Args:
            batch: a step, its tensors on the host.

        Raises:
            KernelArgumentError: a row or block outside of the pools, as from the kernels.
        """
        meta = batch.decode
        if not self._accepts(batch):
            return None
        assert meta is not None
        check_decode_meta(meta, batch.token_ids.shape[0], self._num_rows)
        check_block_tables(meta, meta.kv_lens, self._num_blocks, self._block_size)
        size = self._sizes[bisect_left(self._sizes, len(meta))]
        buffers, step = (self._steps if batch.changes is None else self._changed)[size]
        buffers.fill(batch)
        step()
        return ForwardOutput(self._logits[: len(meta)])
