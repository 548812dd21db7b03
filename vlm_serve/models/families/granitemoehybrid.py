"""Granite 4: Mamba2 or attention, then a shared MLP and, in most models, experts beside it."""

from __future__ import annotations

from dataclasses import replace

from vlm_serve.errors import CheckpointError
from vlm_serve.models.config import Config, Defaults, numbers_of
from vlm_serve.models.families import shared
from vlm_serve.models.parts.attention import Attention
from vlm_serve.models.parts.base import Mixer
from vlm_serve.models.parts.feed_forward import Experts, Mlp
from vlm_serve.models.parts.mamba2 import Mamba2
from vlm_serve.models.spec import NORMS, BranchSpec, LayerSpec, ModelSpec, Scales
from vlm_serve.preprocess.text.family import GRANITE

_ATTENDING, _MAMBA = "full_attention", "linear_attention"
_SHARED = ("input_linear", "input_linear", "output_linear")


DEFAULTS: Defaults = {
    "GraniteMoeHybridConfig": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": lambda text: text.size("num_attention_heads"),
        # Of the models' attention; the class has no such field.
        "head_dim": shared.quotient_head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "layer_types": lambda text: [_MAMBA] * text.size("num_hidden_layers"),
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "time_step_limit": (0.0, float("inf")),
    }
}
"""Defaults of transformers' class, for fields that a file omits."""


def spec(config: Config) -> ModelSpec:
    """Return the model of a config.json."""
    config.expect("hidden_act", "silu")
    config.allow("normalization_function", "rmsnorm")
    config.allow("position_embedding_type", "nope", "rope")
    turning = config.raw.get("position_embedding_type") == "rope"
    unrotated = shared.unrotated(config)
    rope = shared.rope(config, partial=False, sections=False) if turning else unrotated
    kinds = shared.block_types(config, (_MAMBA, _ATTENDING), config.size("num_hidden_layers"))
    mixers: dict[str, Mixer] = {}
    if _ATTENDING in kinds:
        mixers[_ATTENDING] = _attention(config)
    if _MAMBA in kinds:
        mixers[_MAMBA] = _mamba(config)
    behind = _behind(config)
    scales = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    made = shared.model(config, config, [], rope, family=GRANITE, centred=False)
    layers = (LayerSpec((BranchSpec(mixers[kind], NORMS[0]), *behind)) for kind in kinds)
    return replace(made, layers=tuple(layers), scales=Scales(*map(config.positive, scales)))


def _attention(config: Config) -> Attention:
    plain = shared.attention(config, gated=False, norms=False)
    bias = bool(config.given("attention_bias"))
    factor = config.positive("attention_multiplier")
    return replace(plain, bias=bias, out_bias=bias, scale=factor)


def _mamba(config: Config) -> Mamba2:
    heads, limits = config.size("mamba_n_heads"), config.given("time_step_limit")
    try:
        low, high = map(float, numbers_of(limits))
    except (TypeError, ValueError):
        complaint = f"time_step_limit {limits!r} is not supported, only two numbers"
        raise CheckpointError(complaint) from None
    shared.check_limits("time_step_limit", (low, high))
    if config.raw.get("mamba_d_head", "auto") == "auto":
        head_dim = config.size("mamba_expand") * config.size("hidden_size") // heads
    else:
        head_dim = config.size("mamba_d_head")
    # The norm of the class has one group whatever those of B and C are; no published file has more.
    config.expect("mamba_n_groups", 1)
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=1,
        state_dim=config.size("mamba_d_state"),
        taps=config.size("mamba_d_conv"),
        limits=(low, high),
        bias=bool(config.given("mamba_proj_bias")),
        conv_bias=bool(config.given("mamba_conv_bias")),
    )


def _behind(config: Config) -> tuple[BranchSpec, ...]:
    """Return the branches behind a mixer: the shared MLP, and experts that take what it takes."""
    dense = Mlp(config.size("shared_intermediate_size"), "shared_mlp", _SHARED)
    if config.given("num_local_experts") == 0:
        return (BranchSpec(dense, NORMS[1]),)
    routing = shared.routing(config, "num_local_experts")
    size, name = config.size("intermediate_size"), "block_sparse_moe"
    experts = Experts(routing, size, 0, name=name, router="router")
    return BranchSpec(dense, NORMS[1]), BranchSpec(experts, None)
