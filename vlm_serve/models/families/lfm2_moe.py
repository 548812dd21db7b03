"""LFM2-MoE: LFM2's layers, with experts that are chosen by sigmoids behind the first dense ones."""

from __future__ import annotations

from dataclasses import replace

from vlm_serve.errors import CheckpointError
from vlm_serve.models.config import Config, Defaults
from vlm_serve.models.families import lfm2, shared
from vlm_serve.models.parts.feed_forward import Mlp
from vlm_serve.models.spec import ModelSpec

DEFAULTS: Defaults = {
    "Lfm2MoeConfig": lfm2.TEXT
    | {
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    },
}
"""Defaults of transformers' classes, for fields that a file omits."""


def spec(config: Config) -> ModelSpec:
    """Return the model of a config.json."""
    config.expect("norm_topk_prob", True)
    experts, name = shared.experts(config, shared=False), "feed_forward"
    choice = bool(config.given("use_expert_bias")), config.positive("routed_scaling_factor"), 1e-6
    routed = replace(
        experts, routed=replace(experts.routed, sigmoids=choice), name=name, parts=lfm2.PARTS
    )
    dense = config.given("num_dense_layers")
    if type(dense) is not int or dense < 0:
        raise CheckpointError(f"num_dense_layers {dense!r} in config.json is no number of layers")
    plain = Mlp(config.size("intermediate_size"), name, lfm2.PARTS)
    count = config.size("num_hidden_layers")
    layers = [plain if index < dense else routed for index in range(count)]
    return lfm2.language_model(config, config, layers)
