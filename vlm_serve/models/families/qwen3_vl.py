"""Qwen3-VL and Qwen3-VL-MoE, the reasoner of Cosmos3, which is Qwen3-VL, and the thinker of
Qwen3-Omni, whose parts they are: attention without gates, and a vision tower whose middle layers
add features behind the decoder's first ones."""

from __future__ import annotations

from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.models.config import Config, Defaults
from vlm_serve.models.families import shared
from vlm_serve.models.parts.base import FeedForward
from vlm_serve.models.spec import ModelSpec
from vlm_serve.preprocess.text.family import family_of

_TEXT: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_act": "silu",
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    # Of the models' Qwen3VLTextRotaryEmbedding and Qwen3VLMoeTextRotaryEmbedding.
    "mrope_section": [24, 20, 20],
}
_VISION = shared.VISION_DEFAULTS | {"deepstack_visual_indexes": (8, 16, 24)}


DEFAULTS: Defaults = {
    "Qwen3VLTextConfig": _TEXT
    | {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
    "Qwen3VLMoeTextConfig": _TEXT
    | {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": shared.quotient_head_dim,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_experts": 60,
    },
    "Qwen3OmniMoeTextConfig": _TEXT
    | {
        "vocab_size": 3584,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "hidden_size": 2048,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": shared.quotient_head_dim,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    "Qwen3VLVisionConfig": _VISION,
    "Qwen3VLMoeVisionConfig": _VISION,
    "Qwen3OmniMoeVisionEncoderConfig": _VISION,
    "Qwen3OmniMoeThinkerConfig": {"tie_word_embeddings": False},
}
"""Defaults of transformers' classes, for fields that a file omits."""


def spec(config: Config) -> ModelSpec:
    """Return the model of a config.json, dense or MoE."""
    kind, text_class, tower_class = config.raw["model_type"], "", ""
    family, omni = family_of(kind), kind.startswith("qwen3_omni")
    if kind == "cosmos3_omni":
        config = config.viewed("Qwen3VLConfig", "qwen3_vl")
    elif omni:
        config = config.viewed("Qwen3OmniMoeThinkerConfig", "qwen3_omni_moe")
        text_class, tower_class = "Qwen3OmniMoeTextConfig", "Qwen3OmniMoeVisionEncoderConfig"
    alone = kind.endswith("_text")
    text = config if alone else shared.text_section(config, text_class)
    mixer = shared.plain_attention(text)
    layers = [(mixer, feed_forward) for feed_forward in _feed_forwards(config, text, omni=omni)]
    tower = None
    if not alone:
        tower = shared.vision(config, deepstack=True, source=tower_class, omni=omni)
    if tower is not None and len(tower.deepstack) >= len(layers):
        raise CheckpointError(
            f"deepstack_visual_indexes {list(tower.deepstack)} are too many for "
            f"num_hidden_layers {len(layers)}"
        )
    rope = shared.rope(text, partial=False, sections=True)
    return shared.model(config, text, layers, rope, family=family, centred=False, tower=tower)


def _feed_forwards(config: Config, text: Config, *, omni: bool) -> list[FeedForward]:
    if "moe" not in config.raw["model_type"]:
        return [shared.mlp(text)] * text.size("num_hidden_layers")
    return shared.sparse_layers(text, shared.experts(text, shared=False, transposed=not omni))
