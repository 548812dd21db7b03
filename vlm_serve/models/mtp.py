"""The multi-token-prediction layer (`mtp.*` of Qwen3.5's and Qwen3-Next's checkpoints): drafts the
token after next.

Its input at a token is that token's embedding and the hidden state of the preceding token, behind
the model's final norm and at that one's position (as in vLLM). Its keys therefore begin with the
second token, and the first slot of a sequence's KV is unused. For further drafts its own output
takes the place of the hidden state. Embeddings and output projection are the model's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.linear import Linear, Part
from vlm_serve.kernels.norms import rms_norm
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors
from vlm_serve.models.compiled_step import CompiledStep
from vlm_serve.models.decoder import load_layer
from vlm_serve.models.parts.base import Step, load_norm
from vlm_serve.models.program import Program
from vlm_serve.models.spec import ModelSpec
from vlm_serve.models.weights import Weights

_ANCHOR = "mtp.norm.weight"
FIRST_KEY = 1
"""The slot of a sequence's first key: its second token's."""


class Predictor:
    """The layer, and its pools.

    Args:
        spec: the model; its `mtp` is not None.
        source: of the weights.

    Raises:
        CheckpointError: it has no such layer.
    """

    def __init__(self, spec: ModelSpec, source: Weights) -> None:
        assert spec.mtp is not None
        if _ANCHOR not in source:
            raise CheckpointError(
                f"the checkpoint has no tensors of a draft layer ({_ANCHOR}): leave mtp out of "
                "--speculative"
            )
        hidden, norm = spec.hidden_size, spec.norm
        self._spec = spec
        self._embedding_norm = load_norm(source, "mtp.pre_fc_norm_embedding", hidden, norm)
        self._hidden_norm = load_norm(source, "mtp.pre_fc_norm_hidden", hidden, norm)
        self._join = source.linear(Part("mtp.fc.weight", (hidden, 2 * hidden)))
        self._layer = load_layer(spec, spec.mtp, source, "mtp.layers.0")
        self._norm = load_norm(source, "mtp.norm", hidden, norm)
        self._compiled: CompiledStep | None = None

    def compile(self, caches: CacheTensors, inv_freq: torch.Tensor, head: Linear) -> None:
        """Compute the layer over these pools with compiled code; raises as
        `Model.compile_steps`."""
        eps, layer = self._spec.norm.eps, self._layer
        program = Program(self._norm.dtype, self._spec.hidden_size, first_key=FIRST_KEY)
        rope = self._spec.rope
        program.rotate(inv_freq, rope.axes, rope.scale)
        layer.lower(program, self._bind(caches), last=True)
        program.norm(self._norm, eps)
        program.hidden()
        program.logits(head)
        # The layer has no state rows.
        self._compiled = CompiledStep(program, replace(caches, num_rows=0))

    def forward(
        self,
        batch: ForwardBatch,
        embedded: torch.Tensor,
        before: torch.Tensor,
        caches: CacheTensors,
        inv_freq: torch.Tensor,
        head: Linear,
    ) -> ForwardOutput:
        """Implement `Model.draft`; `embedded`: `[T, hidden]`, the tokens' embeddings."""
        eps = self._spec.norm.eps
        pair = (
            rms_norm(embedded, self._embedding_norm, eps),
            rms_norm(before, self._hidden_norm, eps),
        )
        x = self._join(torch.cat(pair, dim=-1), deterministic=batch.deterministic)
        if self._compiled is not None:
            logits, _, hidden, _ = self._compiled.run(batch, x)
            assert hidden is not None
            return ForwardOutput(logits, hidden=hidden[: logits.shape[0]])
        layer = self._layer
        cos, sin = self._spec.rope.cos_sin(batch.positions, inv_freq)
        step = Step(
            decode=batch.decode,
            prefill=batch.prefill,
            verify=None,
            slots=batch.slots,
            cos=cos,
            sin=sin,
            deterministic=batch.deterministic,
            first_key=FIRST_KEY,
        )
        x, _, _ = layer.apply(x, self._bind(caches), step, batch.logit_rows)
        hidden = rms_norm(x, self._norm, eps)
        logits = head(hidden, deterministic=batch.deterministic).float()
        return ForwardOutput(logits, hidden=hidden)

    def _bind(self, caches: CacheTensors) -> tuple[Any, ...]:
        """Return its pools, which come behind those of all other layers."""
        return self._layer.bind(caches.of_layer(len(self._spec.layers)))
