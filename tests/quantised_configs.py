"""Configurations in the words of published quantised checkpoints."""

from __future__ import annotations

from typing import Any

from vlm_serve.models.quantization.scheme import QuantScheme

LAYER = "model.language_model.layers.0."
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": [
        "lm_head",
        "model.language_model.embed_tokens",
        "model.language_model.layers.0.linear_attn.conv1d",
        "model.language_model.layers.0.linear_attn.in_proj_a",
        "model.language_model.layers.0.linear_attn.in_proj_b",
        "model.language_model.layers.0.mlp.gate",
        "model.visual.blocks.0.attn.qkv",
    ],
}
# The rules of the published Qwen3.5 GPTQ-Int4 checkpoints.
GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": False,
    "dynamic": {
        "lm_head": {},
        "model.language_model.embed_tokens": {},
        "-:.*attn.*": {},
        "-:.*shared_expert.*": {},
        "-:.*mtp.*": {},
        "-:.*visual.*": {},
    },
}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["visual", "linear_attn.in_proj_a"],
}
AUTO_ROUND: dict[str, Any] = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "data_type": "int",
    "extra_config": {"mlp.up_proj": {"bits": 8}, "lm_head": {"bits": 16, "data_type": "float"}},
}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 128, "strategy": "group"}
PACKED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
    "ignore": ["lm_head", "re:.*visual.*", "model.layers.0.linear_attn.in_proj_a"],
}
CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
MODELOPT: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
    "ignore": ["lm_head", "model.language_model.layers.0.self_attn*", "*.mlp.gate", "mtp*"],
}
# As the official NVFP4 checkpoints of Qwen3.6 have it: attention in FP8, the rest in FP4.
MODELOPT_MIXED: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        f"{LAYER}linear_attn.in_proj_qkv": {"quant_algo": "FP8"},
        f"{LAYER}linear_attn.out_proj": {"quant_algo": "fp8"},
        f"{LAYER}mlp.gate_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        f"{LAYER}mlp.experts*": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    },
    "ignore": ["lm_head*", "model.visual*", "mtp*"],
}


def scheme(fields: Any) -> QuantScheme:
    found = QuantScheme.of({"quantization_config": fields})
    assert found is not None
    return found
