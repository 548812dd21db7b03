"""A made-up architecture of known parts, as somebody would add one: attention without gates and one
axis of rotation, then a layer with state (Gated DeltaNet or Mamba2) with routed experts
alone, in turns; plain norms."""

from __future__ import annotations

import math

from vlm_serve.models.config import Config
from vlm_serve.models.parts.attention import Attention
from vlm_serve.models.parts.base import Mixer, Norm, Routing
from vlm_serve.models.parts.feed_forward import Experts, Mlp
from vlm_serve.models.parts.gated_delta import GatedDelta
from vlm_serve.models.parts.mamba2 import Mamba2
from vlm_serve.models.spec import LayerSpec, ModelSpec, Rope
from vlm_serve.preprocess.text.family import CHATML


def spec(config: Config) -> ModelSpec:
    """The model of a config.json."""
    heads, head_dim = config.size("num_attention_heads"), config.size("head_dim")
    attending = LayerSpec.of(
        Attention(heads, config.size("num_key_value_heads"), head_dim, gated=False, name="attn"),
        Mlp(config.size("intermediate_size"), name="ffn"),
        ("norm_1", "norm_2"),
    )
    remembering = LayerSpec.of(
        _memory(config),
        Experts(
            Routing(config.size("num_experts"), config.size("num_experts_per_tok")),
            size=config.size("expert_size"),
            shared=0,
            name="moe",
        ),
        ("norm_1", "norm_2"),
    )
    return ModelSpec(
        hidden_size=config.size("hidden_size"),
        vocab_size=config.size("vocab_size"),
        max_position_embeddings=config.size("max_position_embeddings"),
        layers=(attending, remembering) * (config.size("num_hidden_layers") // 2),
        norm=Norm(config.number("norm_eps"), centred=False),
        rope=Rope(config.number("rope_theta"), head_dim, (head_dim // 2, 0, 0)),
        tied_embeddings=True,
        vision=None,
        dtype=config.dtype(),
        family=CHATML,
    )


def _memory(config: Config) -> Mixer:
    if config.given("memory") == "mamba2":
        return Mamba2(
            heads=config.size("mamba_heads"),
            head_dim=config.size("mamba_head_dim"),
            groups=config.size("mamba_groups"),
            state_dim=config.size("mamba_state_dim"),
            taps=config.size("conv_width"),
            limits=(config.number("least_step"), math.inf),
            bias=config.given("mamba_bias"),
            name="memory",
        )
    return GatedDelta(
        key_heads=config.size("state_key_heads"),
        value_heads=config.size("state_value_heads"),
        key_dim=config.size("state_key_dim"),
        value_dim=config.size("state_value_dim"),
        taps=config.size("conv_width"),
        name="memory",
    )
