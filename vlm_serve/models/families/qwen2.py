"""Qwen2 and Qwen2.5, text alone: attention without gates and norms, whose queries, keys and values
have biases."""

from __future__ import annotations

from typing import Any

from vlm_serve.models.config import Config, Defaults
from vlm_serve.models.families import shared
from vlm_serve.models.spec import ModelSpec
from vlm_serve.preprocess.text.family import family_of

TEXT: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": shared.quotient_head_dim,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
DEFAULTS: Defaults = {"Qwen2Config": TEXT}
"""Defaults of transformers' classes, for fields that a file omits."""


def spec(config: Config) -> ModelSpec:
    """Return the model of a config.json."""
    return language_model(config, config)


def language_model(config: Config, text: Config, *, sections: bool = False) -> ModelSpec:
    """Return the model whose language part is the section `text` of a config.json; `sections`: its
    positions have three axes."""
    text.allow("head_dim", shared.quotient_head_dim(text))
    mixer = shared.plain_attention(text, norms=False)
    layers = [(mixer, shared.mlp(text))] * text.size("num_hidden_layers")
    rope = shared.rope(text, partial=False, sections=sections, interleaved=False)
    family = family_of(config.raw["model_type"])
    return shared.model(config, text, layers, rope, family=family, centred=False)
