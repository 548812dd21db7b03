"""Qwen3-Next: Qwen3.5-MoE's layers with text alone, and the rows of a Gated DeltaNet's input
projections grouped by key head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vlm_serve.models.config import Config
from vlm_serve.models.families import shared
from vlm_serve.models.parts.base import Mixer, Norm
from vlm_serve.models.spec import LayerSpec, ModelSpec
from vlm_serve.preprocess.family import QWEN2

_MIXERS: dict[str, Callable[[Config], Mixer]] = {
    "linear_attention": partial(shared.gated_delta, interleaved=True),
    "full_attention": partial(shared.attention, gated=True),
}


def spec(config: Config) -> ModelSpec:
    """The model of a config.json."""
    config.expect("hidden_act", "silu")
    config.allow("attn_output_gate", True)
    kinds = shared.layer_types(config, _MIXERS)
    mixers = {each: _MIXERS[each](config) for each in set(kinds)}
    feed_forwards = shared.sparse_layers(config, shared.experts(config, shared=True))
    return ModelSpec(
        hidden_size=config.size("hidden_size"),
        vocab_size=config.size("vocab_size"),
        max_position_embeddings=config.size("max_position_embeddings"),
        layers=tuple(
            LayerSpec(mixers[kind], each) for kind, each in zip(kinds, feed_forwards, strict=True)
        ),
        norm=Norm(config.positive("rms_norm_eps")),
        rope=shared.rope(config, partial=True, sections=False),
        tied_embeddings=shared.tied_embeddings(config, config),
        vision=None,
        dtype=config.dtype(),
        family=QWEN2,
    )
