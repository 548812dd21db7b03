"""Qwen3.5 and Qwen3.5-MoE, with a vision tower or without: three Gated DeltaNet layers to one of
gated attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vlm_serve.models.config import Config
from vlm_serve.models.families import shared
from vlm_serve.models.parts.base import FeedForward, Mixer, Norm
from vlm_serve.models.spec import LayerSpec, ModelSpec, Rope, Vision
from vlm_serve.preprocess.family import QWEN3_5

_MIXERS: dict[str, Callable[[Config], Mixer]] = {
    "linear_attention": shared.gated_delta,
    "full_attention": partial(shared.attention, gated=True),
}


def spec(config: Config) -> ModelSpec:
    """The model of a config.json."""
    text = config
    if not config.raw["model_type"].endswith("_text"):
        text = shared.text_section(config)
    seeing = bool(config.raw.get("vision_config"))
    vision = shared.vision(config, deepstack=False) if seeing else None
    text.expect("attn_output_gate", True)
    return language_model(config, text, vision, shared.rope(text, partial=True, sections=True))


def language_model(config: Config, text: Config, vision: Vision | None, rope: Rope) -> ModelSpec:
    """The model whose language part is described by a section `text` of a config.json."""
    text.expect("hidden_act", "silu")
    kinds = shared.layer_types(text, _MIXERS)
    mixers = {each: _MIXERS[each](text) for each in set(kinds)}
    feed_forward: FeedForward = (
        shared.experts(text, shared=True) if "moe" in config.raw["model_type"] else shared.mlp(text)
    )
    return ModelSpec(
        hidden_size=text.size("hidden_size"),
        vocab_size=text.size("vocab_size"),
        max_position_embeddings=text.size("max_position_embeddings"),
        layers=tuple(LayerSpec(mixers[each], feed_forward) for each in kinds),
        norm=Norm(text.positive("rms_norm_eps")),
        rope=rope,
        tied_embeddings=shared.tied_embeddings(config, text),
        vision=vision,
        dtype=config.dtype(text),
        family=QWEN3_5,
        mtp=_predictor(text, feed_forward),
    )


def _predictor(text: Config, feed_forward: FeedForward) -> LayerSpec | None:
    """The multi-token-prediction layer: always attention. Published models have one or none."""
    if text.raw.get("mtp_num_hidden_layers") != 1:
        return None
    return LayerSpec(shared.attention(text, gated=True), feed_forward)
