"""Qwen3-Next: Qwen3.5-MoE's layers for text alone, with the rows of a Gated DeltaNet's input
projections grouped by key head."""

from __future__ import annotations

from vlm_serve.models.config import Config, Defaults
from vlm_serve.models.families import shared
from vlm_serve.models.spec import LayerSpec, ModelSpec
from vlm_serve.preprocess.text.family import QWEN2

SEPARATE = "separate_projections"
"""A field of GGUF files' configs: rows lie as in Qwen3.5."""


DEFAULTS: Defaults = {
    "Qwen3NextConfig": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
    }
}
"""Defaults of transformers' class, for fields that a file omits."""


def spec(config: Config) -> ModelSpec:
    """Return the model of a config.json."""
    mixers = shared.hybrid_mixers(config, interleaved=not config.raw.get(SEPARATE))
    experts = shared.experts(config, shared=True)
    feed_forwards = shared.sparse_layers(config, experts)
    rope = shared.rope(config, partial=True, sections=False)
    layers = zip(mixers, feed_forwards, strict=True)
    # Published files hold the tensors of a draft layer, but their configs have no field for it.
    mtp = LayerSpec.of(shared.attention(config, gated=True), experts)
    return shared.model(config, config, layers, rope, family=QWEN2, mtp=mtp)
