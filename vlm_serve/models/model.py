"""A language model with its vision tower: one forward over packed tokens of many sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from vlm_serve.kernels.checks import check_folds
from vlm_serve.kernels.dispatch import compiled_kernels
from vlm_serve.kernels.linear import Linear, Part
from vlm_serve.kernels.norms import rms_norm
from vlm_serve.kernels.rope import mrope_cos_sin
from vlm_serve.kernels.rope.compiled import axes
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors
from vlm_serve.models.compiled_step import CompiledStep
from vlm_serve.models.files import resolve_checkpoint
from vlm_serve.models.fingerprint import fingerprint
from vlm_serve.models.parts.base import LoadedFeedForward, LoadedMixer, Loader, Step, load_norm
from vlm_serve.models.program import Program
from vlm_serve.models.registry import read_spec
from vlm_serve.models.spec import ModelSpec
from vlm_serve.models.vision import Grid, VisionTower
from vlm_serve.models.weights import Weights

_MOST_UINT8_EXPERTS = 256


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: norm, token mixer, norm, feed-forward."""

    input_norm: torch.Tensor
    mixer: LoadedMixer
    post_norm: torch.Tensor
    feed_forward: LoadedFeedForward


class Decoder:
    """The weights of a language model.

    Args:
        spec: the model.
        source: where they come from.
        prefix: of their names, but for the head's.
        head: name of the output projection's; None: the embeddings are tied.
    """

    def __init__(self, spec: ModelSpec, source: Loader, prefix: str, head: str | None) -> None:
        hidden, norm = spec.hidden_size, spec.norm
        table, shape = f"{prefix}embed_tokens.weight", (spec.vocab_size, hidden)
        self.embedding = source.embedding(table, shape)
        self.head: Linear = source.linear(Part(head or table, shape, least_bits=8))
        self.layers = tuple(
            Layer(
                input_norm=load_norm(source, f"{name}.{spec.input_norm}", hidden, norm),
                mixer=layer.mixer.load(source, name, hidden, norm),
                post_norm=load_norm(source, f"{name}.{spec.post_norm}", hidden, norm),
                feed_forward=layer.feed_forward.load(source, name, hidden),
            )
            for layer, name in (
                (layer, f"{prefix}layers.{index}") for index, layer in enumerate(spec.layers)
            )
        )
        self.norm = load_norm(source, f"{prefix}norm", hidden, norm)


class Model:
    """A loaded checkpoint. It holds no state of any sequence; that is in the caches it is given.

    Attributes:
        spec: what it is.
        fingerprint: 32 bytes that stand for the content of the checkpoint.
        weight_dtype: of its projections in memory.
        dtype: of activations and of everything else.
        device: where it runs.
        compiled: whether compiled CPU code multiplies.
        quantised: names of the weights that the checkpoint holds as codes.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, identity: bytes) -> None:
        self.spec = spec
        self.fingerprint = identity
        self.weight_dtype = weights.dtype
        self.dtype = weights.compute_dtype
        self.device = weights.device
        self.compiled = weights.compiled
        head = None if spec.tied_embeddings else weights.head_name()
        self._decoder = Decoder(spec, weights, weights.text_prefix, head)
        exponents = torch.arange(0, spec.rope.rotary_dim, 2, dtype=torch.float)
        inv_freq = 1.0 / (spec.rope.theta ** (exponents / spec.rope.rotary_dim))
        self._inv_freq = inv_freq.to(self.device)
        self._vision = None
        if spec.vision is not None:
            self._vision = VisionTower(
                spec.vision, weights, weights.vision_prefix(), weights.compute_dtype
            )
        self.quantised = frozenset(weights.quantised)
        self._caches: CacheTensors | None = None
        self._bound: tuple[Any, ...] = ()
        self._compiled_step: CompiledStep | None = None

    def compile_steps(self, caches: CacheTensors) -> None:
        """Have steps over these pools computed by one call of compiled code each, from now on.

        Raises:
            BuildError: it can be neither found nor built here.
            UnsupportedError: it does not know this model, or pools like these.
        """
        spec, program = self.spec, Program(self.dtype, self.spec.hidden_size)
        eps = spec.norm.eps
        program.rotate(self._inv_freq, axes(len(self._inv_freq), spec.rope.sections))
        layers = zip(self._decoder.layers, self._bind(caches), strict=True)
        for index, (layer, cache) in enumerate(layers):
            program.norm(layer.input_norm, eps)
            layer.mixer.lower(program, cache, last=layer is self._decoder.layers[-1])
            program.norm(layer.post_norm, eps)
            layer.feed_forward.lower(program)
            if index < spec.media_features:
                program.features(index)
        program.keep(program.normed, 0, reporting=True)
        program.norm(self._decoder.norm, eps)
        program.logits(self._decoder.head)
        self._compiled_step = CompiledStep(program, caches)

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

    @torch.inference_mode()
    def fold(self, caches: CacheTensors, folds: Sequence[tuple[int, int, int]]) -> None:
        """Folds what drafted tokens have left behind into state rows: (row, first update, count)
        each, all rows and updates apart."""
        check_folds(folds, caches.num_rows, caches.num_updates)
        bound = self._bind(caches)
        if self._compiled_step is not None:
            self._compiled_step.fold(folds)
            return
        with compiled_kernels(self.compiled):
            for layer, cache in zip(self._decoder.layers, bound, strict=True):
                layer.mixer.fold(cache, folds)

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        x = F.embedding(batch.token_ids, self._decoder.embedding).to(self.dtype)
        for offset, rows in batch.media:
            x[offset : offset + rows.shape[0]] = rows[:, : self.spec.hidden_size]
        return x

    def _add_features(self, x: torch.Tensor, batch: ForwardBatch, index: int) -> None:
        """What media add to the residual behind the layer of that index."""
        hidden = self.spec.hidden_size
        for offset, rows in batch.media:
            first = (1 + index) * hidden
            x[offset : offset + rows.shape[0]] += rows[:, first : first + hidden]

    def _by_ops(self, batch: ForwardBatch, caches: CacheTensors) -> ForwardOutput:
        x, layers, eps = self._embed(batch), self._decoder.layers, self.spec.norm.eps
        cos, sin = mrope_cos_sin(batch.positions, self._inv_freq, self.spec.rope.sections)
        step = Step(
            decode=batch.decode,
            prefill=batch.prefill,
            verify=batch.verify,
            slots=batch.slots,
            cos=cos,
            sin=sin,
            deterministic=batch.deterministic,
        )
        routed: list[torch.Tensor] = []
        for index, (layer, cache) in enumerate(zip(layers, self._bind(caches), strict=True)):
            # Behind the last token mixer only the rows with wanted logits matter.
            last = layer is layers[-1] and not batch.capture_experts
            keep = batch.logit_rows if last else None
            x = layer.mixer.apply(rms_norm(x, layer.input_norm, eps), x, cache, step, keep)
            x, ids = layer.feed_forward.apply(rms_norm(x, layer.post_norm, eps), x, step)
            if ids is not None:
                routed.append(ids)
            if index < self.spec.media_features:
                self._add_features(x, batch, index)
        if batch.capture_experts:
            x = x[batch.logit_rows]
        last_normed = rms_norm(x, self._decoder.norm, eps)
        logits = self._decoder.head(last_normed, deterministic=batch.deterministic).float()
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

    def _bind(self, caches: CacheTensors) -> tuple[Any, ...]:
        """Each layer's part of the pools, made anew only when the pools change."""
        if self._caches is not caches:
            self._caches, self._compiled_step = caches, None
            self._bound = tuple(
                layer.mixer.bind(caches.of_layer(index))
                for index, layer in enumerate(self._decoder.layers)
            )
        return self._bound

    def _narrow(self, ids: torch.Tensor) -> torch.Tensor:
        routing = self.spec.routing
        assert routing is not None, "only routers choose experts"
        return ids.to(torch.uint8 if routing.num_experts <= _MOST_UINT8_EXPERTS else torch.int16)


def load_model(
    path: Path | str,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    compute_dtype: torch.dtype | None = None,
    compiled: bool = False,
    bits: int | None = None,
    dynamic: bool = False,
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
        bits: 8 or 4: to what plain weights are quantised, where their parts allow.
        dynamic: whether compiled code quantises activations beside integer codes as well.

    Raises:
        ModelNotFoundError: no such checkpoint.
        CheckpointError: it is incomplete, broken or of an unsupported kind.
        BuildError: compiled code is wanted and cannot be had.
    """
    directory = resolve_checkpoint(path)
    spec = read_spec(directory)
    weights = Weights(
        directory,
        dtype,
        torch.device(device),
        compute_dtype=compute_dtype,
        compiled=compiled,
        scheme=spec.quantization,
        bits=bits,
        dynamic=dynamic,
    )
    return Model(spec, weights, fingerprint(directory))
