"""Qwen3.5, dense and mixture of experts: one forward over packed tokens of many sequences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.dispatch import compiled_kernels
from vlm_serve.kernels.metadata import KVLayer
from vlm_serve.kernels.norms import rms_norm
from vlm_serve.kernels.rope import mrope_cos_sin
from vlm_serve.models.batch import CacheTensors, ForwardBatch, ForwardOutput
from vlm_serve.models.compiled_program import Program
from vlm_serve.models.compiled_step import CompiledStep
from vlm_serve.models.config import ModelConfig
from vlm_serve.models.files import resolve_checkpoint
from vlm_serve.models.fingerprint import fingerprint
from vlm_serve.models.layers import (
    DecoderLayer,
    GatedDeltaNet,
    Mlp,
    StateLayer,
    Step,
    attention,
    experts,
    gated_delta_net,
    mlp,
)
from vlm_serve.models.loading import TextLoader
from vlm_serve.models.vision import Grid, VisionTower
from vlm_serve.models.weights import Weights

_MOST_UINT8_EXPERTS = 256


class Model:
    """A loaded checkpoint. It holds no state of any sequence; that is in the caches it is given.

    Attributes:
        config: its sizes.
        fingerprint: 32 bytes that stand for the content of the checkpoint.
        weight_dtype: of its projections in memory.
        dtype: of activations and of everything else.
        device: where it runs.
        compiled: whether compiled CPU code multiplies.
    """

    def __init__(self, config: ModelConfig, weights: Weights, identity: bytes) -> None:
        self.config = config
        self.fingerprint = identity
        self.weight_dtype = weights.dtype
        self.dtype = weights.compute_dtype
        self.device = weights.device
        self.compiled = weights.compiled
        text, load = config.text, TextLoader(config.text, weights)
        self._embedding, self._head = load.embedding_and_head()
        self._layers = tuple(
            DecoderLayer(
                input_norm=load.norm(f"layers.{index}.input_layernorm"),
                mixer=load.mixer(index),
                post_norm=load.norm(f"layers.{index}.post_attention_layernorm"),
                feed_forward=load.feed_forward(index),
            )
            for index in range(text.num_layers)
        )
        self._norm = load.norm("norm")
        exponents = torch.arange(0, text.rope.rotary_dim, 2, dtype=torch.float)
        inv_freq = 1.0 / (text.rope.theta ** (exponents / text.rope.rotary_dim))
        self._inv_freq = inv_freq.to(self.device)
        self._vision = None if config.vision is None else VisionTower(config.vision, weights)
        self._caches: CacheTensors | None = None
        self._cache_layers: tuple[KVLayer | StateLayer, ...] = ()
        self._compiled_step: CompiledStep | None = None

    def compile_steps(self, caches: CacheTensors) -> None:
        """Have steps over these pools computed by one call of compiled code each, from now on.

        Raises:
            BuildError: it can be neither found nor built here.
            UnsupportedError: it does not know this model, or pools like these.
        """
        program = Program(
            self.config.text,
            self._layers,
            self._norm,
            self._head,
            self._inv_freq,
            caches,
            self._layers_of(caches),
        )
        self._compiled_step = CompiledStep(program, self.dtype)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, caches: CacheTensors) -> ForwardOutput:
        """One step: read and write the caches, return the logits that were asked for.

        Raises whatever an op raises; the state rows written so far are then undefined.
        """
        if caches is self._caches and self._compiled_step is not None:
            logits, ids = self._compiled_step.run(batch, self._embed(batch))
            return ForwardOutput(logits, None if ids is None else self._narrow(ids))
        with compiled_kernels(self.compiled):
            return self._by_ops(batch, caches)

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        x = F.embedding(batch.token_ids, self._embedding).to(self.dtype)
        for offset, embedding in batch.media:
            x[offset : offset + embedding.shape[0]] = embedding
        return x

    def _by_ops(self, batch: ForwardBatch, caches: CacheTensors) -> ForwardOutput:
        x = self._embed(batch)
        rope, eps = self.config.text.rope, self.config.text.norm_eps
        cos, sin = mrope_cos_sin(batch.positions, self._inv_freq, rope.sections)
        step = Step(
            decode=batch.decode,
            prefill=batch.prefill,
            num_decode=0 if batch.decode is None else len(batch.decode),
            slots=batch.slots,
            cos=cos,
            sin=sin,
            deterministic=batch.deterministic,
        )
        # Behind the last token mixer only the rows with wanted logits matter.
        last = self.config.text.num_layers - 1
        routed: list[torch.Tensor] = []
        for index, (layer, cache) in enumerate(
            zip(self._layers, self._layers_of(caches), strict=True)
        ):
            keep = batch.logit_rows if index == last and not batch.capture_experts else None
            x = _mix(layer, x, cache, step, keep, eps)
            normed = rms_norm(x, layer.post_norm, eps)
            if isinstance(layer.feed_forward, Mlp):
                x = mlp(layer.feed_forward, normed, x, step)
            else:
                x, ids = experts(layer.feed_forward, normed, x, step)
                routed.append(ids)
        if batch.capture_experts:
            x = x[batch.logit_rows]
        last_normed = rms_norm(x, self._norm, eps)
        logits = self._head(last_normed, deterministic=batch.deterministic).float()
        if not routed or not batch.capture_experts:
            return ForwardOutput(logits)
        return ForwardOutput(logits, self._narrow(torch.stack(routed, dim=1)))

    def encode_media(
        self, patches: torch.Tensor, grids: Sequence[Grid], deterministic: bool = False
    ) -> list[torch.Tensor]:
        """Embeddings of temporal patches; see `VisionTower.encode`."""
        assert self._vision is not None, "a text-only model has no vision tower"
        with compiled_kernels(self.compiled):
            return self._vision.encode(patches, grids, deterministic=deterministic)

    def _layers_of(self, caches: CacheTensors) -> tuple[KVLayer | StateLayer, ...]:
        """Each layer's views into the pools, made anew only when the pools change."""
        if self._caches is not caches:
            self._caches, self._cache_layers = caches, _cache_layers(self.config, caches)
            self._compiled_step = None
        return self._cache_layers

    def _narrow(self, ids: torch.Tensor) -> torch.Tensor:
        moe = self.config.text.moe
        assert moe is not None, "only routers choose experts"
        return ids.to(torch.uint8 if moe.num_experts <= _MOST_UINT8_EXPERTS else torch.int16)


def load_model(
    path: Path | str,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    compute_dtype: torch.dtype | None = None,
    compiled: bool = False,
) -> Model:
    """Load a checkpoint.

    Args:
        path: directory or hub id.
        dtype: float32, bfloat16 or float16, of the projections in memory; what the checkpoint holds
            is converted.
        device: where the model runs.
        compute_dtype: of activations; `dtype` if it is not given. Only compiled code takes another
            one: float32 with any dtype.
        compiled: whether compiled CPU code is to compute what it can.

    Raises:
        ModelNotFoundError: no such checkpoint.
        CheckpointError: it is incomplete, broken or of an unsupported kind.
        BuildError: compiled code is wanted and cannot be had.
    """
    directory = resolve_checkpoint(path)
    config = ModelConfig.from_dir(directory)
    if config.vision is not None and config.vision.out_hidden_size != config.text.hidden_size:
        raise CheckpointError("out_hidden_size of the vision tower is not the model's hidden_size")
    weights = Weights(
        directory, dtype, torch.device(device), compute_dtype=compute_dtype, compiled=compiled
    )
    return Model(config, weights, fingerprint(directory))


def _mix(
    layer: DecoderLayer,
    x: torch.Tensor,
    cache: KVLayer | StateLayer,
    step: Step,
    keep: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    normed = rms_norm(x, layer.input_norm, eps)
    if isinstance(layer.mixer, GatedDeltaNet):
        assert isinstance(cache, StateLayer)
        return gated_delta_net(layer.mixer, normed, x, cache, step, keep)
    assert isinstance(cache, KVLayer)
    return attention(layer.mixer, normed, x, cache, step, keep)


def _cache_layers(config: ModelConfig, caches: CacheTensors) -> tuple[KVLayer | StateLayer, ...]:
    layers: list[KVLayer | StateLayer] = []
    attention_index = state_index = 0
    for kind in config.text.layer_types:
        if kind == "full_attention":
            layers.append(_kv_layer(caches, attention_index))
            attention_index += 1
        else:
            conv, recurrent = caches.conv[:, state_index], caches.recurrent[:, state_index]
            layers.append(StateLayer(conv, recurrent))
            state_index += 1
    return tuple(layers)


def _kv_layer(caches: CacheTensors, index: int) -> KVLayer:
    k, v = caches.kv[:, index, 0], caches.kv[:, index, 1]
    if caches.kv_scales is None:
        return KVLayer(k, v)
    return KVLayer(k, v, *(caches.kv_scales[:, index, part] for part in range(4)))
