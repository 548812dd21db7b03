"""Qwen3.5 and Qwen3.5-MoE, with a vision tower or without: three Gated DeltaNet layers per layer of
gated attention."""

from __future__ import annotations

from typing import Any

from vlm_serve.models.config import Config, Defaults
from vlm_serve.models.families import shared
from vlm_serve.models.parts.base import FeedForward
from vlm_serve.models.spec import LayerSpec, ModelSpec, Rope, Vision
from vlm_serve.preprocess.text.family import QWEN3_5

_TEXT: dict[str, Any] = {
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    # Of the models' Qwen3_5TextRotaryEmbedding and Qwen3_5MoeTextRotaryEmbedding.
    "mrope_section": [11, 11, 10],
}
DEFAULTS: Defaults = {
    "Qwen3_5TextConfig": _TEXT
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    "Qwen3_5MoeTextConfig": _TEXT
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
    "Qwen3_5VisionConfig": shared.VISION_DEFAULTS,
    "Qwen3_5MoeVisionConfig": shared.VISION_DEFAULTS,
}
"""Defaults of transformers' classes, for fields that a file omits."""


def spec(config: Config) -> ModelSpec:
    """Return the model of a config.json."""
    text = config
    if not config.raw["model_type"].endswith("_text"):
        text = shared.text_section(config)
    seeing = bool(config.raw.get("vision_config"))
    vision = shared.vision(config, deepstack=False) if seeing else None
    return language_model(config, text, vision, shared.rope(text, partial=True, sections=True))


def language_model(config: Config, text: Config, vision: Vision | None, rope: Rope) -> ModelSpec:
    """Return the model whose language part is the section `text` of a config.json."""
    mixers = shared.hybrid_mixers(text)
    feed_forward: FeedForward = (
        shared.experts(text, shared=True) if "moe" in config.raw["model_type"] else shared.mlp(text)
    )
    layers = [(mixer, feed_forward) for mixer in mixers]
    mtp = _predictor(text, feed_forward)
    return shared.model(config, text, layers, rope, family=QWEN3_5, tower=vision, mtp=mtp)


def _predictor(text: Config, feed_forward: FeedForward) -> LayerSpec | None:
    """Return the multi-token-prediction layer, which is always attention. Published models have
    one or none."""
    if text.raw.get("mtp_num_hidden_layers") != 1:
        return None
    text.allow("mtp_use_dedicated_embeddings", False)
    return LayerSpec.of(shared.attention(text, gated=True), feed_forward)
