"""Replays steps with a short prefill from CUDA graphs: the rest of a prompt behind a cache hit, or
a part of one that leaves time for others.

Such a step has as many launches as a decode step, and more tables. It is padded to one of a few
token counts and may contain decoding sequences.
"""

from __future__ import annotations

from typing import Unpack

import torch

from vlm_serve.engine.decode_graphs import LARGEST, StepGraphs, StepLimits
from vlm_serve.engine.graph_device import Step, largest_first
from vlm_serve.engine.prefill_buffers import PrefillBuffers, PrefillSizes, TileForm, tile_forms
from vlm_serve.engine.step_tables import TableMemory
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors

TOKENS = (64, 128, 256, 512, 768, 1024, 1536, 2048)
"""Prompt tokens of the captured steps. Longer steps keep a GPU busy without graphs."""
SEQUENCES = 4
"""Maximum number of prefill slices in a step."""
DECODES = 32
"""Decoding sequences of most steps. Steps with more of them have graphs of their own, since each
takes the time of all that it has room for."""


def token_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of prompt tokens to capture, for steps of up to `most` tokens."""
    return tuple(size for size, less in zip(TOKENS, (0, *TOKENS), strict=False) if less < most)


def decode_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of decoding sequences to capture beside prompts, ascending."""
    return tuple(sorted({min(DECODES, most), min(LARGEST, most)}))


class PrefillGraphs(StepGraphs):
    """Runs steps with short prefills from captured graphs.

    Args:
        model, caches, limits: see `StepGraphs`.
        most_tokens: prompt tokens of the longest step.
    """

    def __init__(
        self,
        model: Model,
        caches: CacheTensors,
        *,
        most_tokens: int = TOKENS[-1],
        **limits: Unpack[StepLimits],
    ) -> None:
        max_num_seqs = limits["max_num_seqs"]
        sequences = min(SEQUENCES, max_num_seqs)
        sizes = [
            PrefillSizes(decodes, tokens, sequences)
            for tokens in token_sizes(most_tokens)
            for decodes in decode_sizes(max_num_seqs)
        ]
        super().__init__(
            model,
            caches,
            most_logits=sizes[-1].logits,
            most_tokens=sizes[-1].decodes + sizes[-1].tokens,
            **limits,
        )
        forms, memory = self._tile_forms(sizes[0]), TableMemory(caches.device)

        def captured(each: PrefillSizes) -> tuple[PrefillBuffers, Step]:
            buffers = PrefillBuffers(
                each,
                self._limits,
                self._ring,
                caches.device,
                forms,
                packs=model.drafts,
                memory=memory,
            )
            return buffers, self._captured(buffers.batch, buffers.packed)

        self._steps = largest_first(sizes, captured)

    def _tile_forms(self, sizes: PrefillSizes) -> tuple[TileForm, ...]:
        """Run a step of padding; return the tile forms that this model's attention uses."""
        batch = PrefillBuffers(sizes, self._limits, self._ring, self._caches.device).batch

        def step() -> None:
            self._model.forward(batch, self._caches)

        self._device.warm_up(step)
        assert batch.prefill is not None
        return tile_forms(batch.prefill.tensors)

    def _find(self, batch: ForwardBatch) -> tuple[PrefillBuffers, Step] | None:
        """Find a graph for this step. It must be a short prefill of few sequences beside few that
        decode. It must have no media, drafts, adapters or routed experts, and need logits of few
        tokens."""
        plain = batch.verify is None and batch.changes is None and not batch.media
        if not plain or batch.capture_experts or batch.deterministic != self._deterministic:
            return None
        return next((each for each in self._steps if each[0].accepts(batch)), None)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> ForwardOutput | None:
        found = self._find(batch)
        return None if found is None else self._replay(*found, batch)
