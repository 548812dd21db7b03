"""Qwen3 and Qwen3-MoE, text alone: attention without gates over the whole of each head."""

from __future__ import annotations

from typing import Any

from vlm_serve.models.config import Config, Defaults
from vlm_serve.models.families import shared
from vlm_serve.models.parts.base import FeedForward
from vlm_serve.models.spec import ModelSpec
from vlm_serve.preprocess.text.family import QWEN2

_COMMON: dict[str, Any] = {
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}

DEFAULTS: Defaults = {
    "Qwen3Config": _COMMON
    | {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
    "Qwen3MoeConfig": _COMMON
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        # Of the model's Qwen3MoeAttention; the class has no such field.
        "head_dim": shared.quotient_head_dim,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
    },
}
"""Defaults of transformers' classes, for fields that a file omits."""


def spec(config: Config) -> ModelSpec:
    """Return the model of a config.json, dense or MoE."""
    return language_model(config, config)


def language_model(config: Config, text: Config) -> ModelSpec:
    """Return the model whose language part is the section `text` of a config.json."""
    text.allow("use_qk_norm", True)
    text.allow("qkv_bias", False)
    mixer = shared.plain_attention(text)
    rope = shared.rope(text, partial=False, sections=False)
    layers = [(mixer, feed_forward) for feed_forward in _feed_forwards(text)]
    return shared.model(config, text, layers, rope, family=QWEN2, centred=False)


def _feed_forwards(config: Config) -> list[FeedForward]:
    if config.raw["model_type"] == "qwen3":
        return [shared.mlp(config)] * config.size("num_hidden_layers")
    # Unlike its kin, transformers' class leaves the weights of a token's experts as they are
    # unless the file says otherwise, as all published ones do.
    config.expect("norm_topk_prob", True)
    config.allow("shared_expert_intermediate_size", 0)
    return shared.sparse_layers(config, shared.experts(config, shared=False))
