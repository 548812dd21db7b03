"""Nemotron-H and Nemotron 3: each layer is one of Mamba2, attention, MLP and experts, without
positions and gates."""

from __future__ import annotations

from dataclasses import replace

from vlm_serve.errors import CheckpointError
from vlm_serve.models.config import Config, Defaults
from vlm_serve.models.families import shared
from vlm_serve.models.parts.feed_forward import UNGATED, Experts, Mlp
from vlm_serve.models.parts.mamba2 import Mamba2
from vlm_serve.models.spec import BranchSpec, LayerSpec, ModelSpec
from vlm_serve.preprocess.text.family import CHATML

_NAME, _NORM = "mixer", "norm"
_EXPERT_BIAS = "gate.e_score_correction_bias"
_NO_FLOOR = 1e-20
DEFAULTS: Defaults = {
    "NemotronHConfig": {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "intermediate_size": 21504,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "n_groups": 8,
        "conv_kernel": 4,
        "time_step_min": 0.001,
        "use_conv_bias": True,
        "use_bias": False,
        "n_routed_experts": 8,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "layer_norm_epsilon": 1e-5,
    }
}
"""Defaults of transformers' class, for fields that a file omits."""


def spec(config: Config) -> ModelSpec:
    """Return the model of a config.json."""
    readers = {
        "linear_attention": _mamba,
        "full_attention": _attention,
        "mlp": _mlp,
        "moe": _experts,
    }
    kinds = shared.block_types(config, readers)
    if not {"linear_attention", "full_attention"} & set(kinds):
        raise CheckpointError("no layer has Mamba2 or attention, so no token sees another one")
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
        config.expect(name, False)
    config.expect("mlp_hidden_act", "relu2")
    config.allow("residual_in_fp32", False)
    for former in ("mamba_n_groups", "mamba_d_conv", "mamba_dt_min", "mamba_conv_bias"):
        config.allow(former, None)
    layers = {kind: LayerSpec(readers[kind](config)) for kind in dict.fromkeys(kinds)}
    made = shared.model(
        *(config, config, [], shared.unrotated(config)),
        family=CHATML,
        centred=False,
        eps="layer_norm_epsilon",
    )
    return replace(made, layers=tuple(layers[kind] for kind in kinds), last_norm="norm_f")


def _attention(config: Config) -> tuple[BranchSpec, ...]:
    plain = shared.attention(config, gated=False, norms=False)
    return (BranchSpec(replace(plain, bias=False, name=_NAME), _NORM),)


def _mamba(config: Config) -> tuple[BranchSpec, ...]:
    config.expect("mamba_hidden_act", "silu")
    sizes = Mamba2(
        heads=config.size("mamba_num_heads"),
        head_dim=config.size("mamba_head_dim"),
        groups=config.size("n_groups"),
        state_dim=config.size("ssm_state_size"),
        taps=config.size("conv_kernel"),
        limits=(config.number("time_step_min"), float("inf")),
        bias=bool(config.given("use_bias")),
        conv_bias=bool(config.given("use_conv_bias")),
        name=_NAME,
    )
    shared.check_limits("time_step_min", sizes.limits)
    shared.check_groups("mamba_num_heads", sizes.heads, sizes.groups)
    return (BranchSpec(sizes, _NORM),)


def _mlp(config: Config) -> tuple[BranchSpec, ...]:
    return (BranchSpec(Mlp(config.size("intermediate_size"), _NAME, UNGATED), _NORM),)


def _experts(config: Config) -> tuple[BranchSpec, ...]:
    """Return the shared expert, and routed ones that take what it takes."""
    for name, only in {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}.items():
        config.expect(name, only)
    config.allow("moe_latent_size", None)
    dense = Mlp(config.size("moe_shared_expert_intermediate_size"), "mixer.shared_experts", UNGATED)
    sigmoids = (True, config.positive("routed_scaling_factor"), _NO_FLOOR)
    routing = replace(shared.routing(config, "n_routed_experts"), sigmoids=sigmoids)
    size = config.size("moe_intermediate_size")
    experts = Experts(routing, size, 0, name=_NAME, parts=UNGATED, bias=_EXPERT_BIAS)
    return BranchSpec(dense, _NORM), BranchSpec(experts, None)
