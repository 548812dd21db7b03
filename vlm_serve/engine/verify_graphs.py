"""Replays steps with drafted tokens from CUDA graphs.

Such a step is a decode step with some tokens per sequence. Every sequence has a place of fixed
size in it, so the number of drafts may change from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch

from vlm_serve.engine.adapters.table import AdapterTable
from vlm_serve.engine.decode_graphs import StepGraphs, StepLimits
from vlm_serve.engine.drafting import max_drafts
from vlm_serve.engine.graph_device import Step, largest_first
from vlm_serve.engine.step_tables import TableMemory
from vlm_serve.engine.verify_buffers import VerifyBuffers, VerifySizes
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors

LARGEST_ROWS = 256
"""Drafted tokens of the largest captured step, padding included. Larger ones keep a GPU busy
without graphs, and each row keeps its logits."""
FEW_DECODES = 8
"""Sequences without drafts beside others, in the smaller of two sizes."""


def powers_up_to(most: int) -> tuple[int, ...]:
    """Return the powers of two below `most`, and `most`."""
    return (*(2**power for power in range(most.bit_length()) if 2**power < most), most)


def verify_sizes(max_num_seqs: int, drafts: int) -> tuple[VerifySizes, ...]:
    """Return the sizes to capture, ascending by their rows.

    Args:
        max_num_seqs: maximum number of sequences in a step.
        drafts: maximum number per sequence, unless few run; see `max_drafts`.
    """
    few = max(1, max_num_seqs // 4)
    found = set[VerifySizes]()
    for room, most in (
        (drafts + 1, max_num_seqs),
        (max_drafts(drafts, 1, max_num_seqs) + 1, few),
    ):
        beside = {0, min(FEW_DECODES, most - 1), most - 1}
        found |= {
            VerifySizes(decodes, count, room)
            for count in powers_up_to(most)
            for decodes in beside
            if count == 1 or count * room <= LARGEST_ROWS
        }
    return tuple(sorted(found, key=lambda sizes: (sizes.rows, sizes.decodes, sizes.room)))


class VerifyGraphs(StepGraphs):
    """Runs steps with drafts, and without prompts, from captured graphs.

    Args:
        model, caches, limits: see `StepGraphs`.
        drafts: maximum number of drafts per sequence, see `verify_sizes`.
        adapters: those of slots, see `DecodeGraphs`.
    """

    def __init__(
        self,
        model: Model,
        caches: CacheTensors,
        *,
        drafts: int,
        adapters: AdapterTable | None = None,
        **limits: Unpack[StepLimits],
    ) -> None:
        sizes = verify_sizes(limits["max_num_seqs"], drafts)
        self._adapters = adapters
        super().__init__(
            model,
            caches,
            most_logits=sizes[-1].rows,
            most_tokens=sizes[-1].rows,
            **limits,
        )
        self._steps = self._set(sizes, None)
        self._changed = [] if adapters is None else self._set(sizes, adapters)

    def _set(
        self, sizes: Sequence[VerifySizes], adapters: AdapterTable | None
    ) -> list[tuple[VerifyBuffers, Step]]:
        """Capture a graph for every size. All share the largest one's tables."""
        device = self._caches.device
        memory = TableMemory(device)

        def captured(each: VerifySizes) -> tuple[VerifyBuffers, Step]:
            buffers = VerifyBuffers(each, self._limits, self._ring, device, adapters, memory)
            return buffers, self._captured(buffers.batch, buffers.batch.logit_rows)

        return largest_first(sizes, captured)

    def _find(self, batch: ForwardBatch) -> tuple[VerifyBuffers, Step] | None:
        """Find a graph for this step. It must have drafts, adapters of slots only, no prompts,
        media or routed experts, and need the logits of all its tokens."""
        plain = batch.prefill is None and not batch.media and not batch.capture_experts
        verify, whole = batch.verify, len(batch.logit_rows) == len(batch.token_ids)
        if verify is None or not plain or not whole:
            return None
        if batch.deterministic != self._deterministic:
            return None
        steps = self._steps if batch.changes is None else self._changed
        return next((each for each in steps if each[0].accepts(batch.decode, verify)), None)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> ForwardOutput | None:
        found = self._find(batch)
        return None if found is None else self._replay(*found, batch)
