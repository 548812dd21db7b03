"""Sizes of a Qwen3.5 checkpoint, and the config.json that goes with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class CheckpointSpec:
    """Sizes of a checkpoint.

    `num_experts > 0` makes it a mixture of experts, `vision_depth = 0` a text-only one
    (`Qwen3_5ForCausalLM`). Raises ValueError for sizes that do not fit together.
    """

    hidden_size: int = 64
    num_layers: int = 4
    intermediate_size: int = 128
    vocab_size: int = 512
    full_attention_interval: int = 4
    gdn_key_heads: int = 2
    gdn_value_heads: int = 4
    gdn_key_dim: int = 16
    gdn_value_dim: int = 16
    conv_kernel: int = 4
    attention_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    num_experts: int = 0
    experts_per_token: int = 2
    moe_intermediate_size: int = 32
    shared_intermediate_size: int = 64
    vision_depth: int = 2
    vision_hidden_size: int = 32
    vision_heads: int = 2
    vision_intermediate_size: int = 64
    patch_size: int = 8
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    num_position_embeddings: int = 64
    image_min_pixels: int = 32 * 32
    image_max_pixels: int = 512 * 512
    video_min_pixels: int = 2 * 32 * 32
    video_max_pixels: int = 64 * 128 * 128
    max_position_embeddings: int = 32768
    rope_theta: float = 10000.0
    tied_embeddings: bool = False
    dtype: str = "float32"
    shards: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def model_type(self) -> str:
        """transformers' name of the family."""
        return "qwen3_5_moe" if self.num_experts else "qwen3_5"


def _validate(spec: CheckpointSpec) -> None:
    if spec.gdn_value_heads % spec.gdn_key_heads:
        raise ValueError("gdn_value_heads must be a multiple of gdn_key_heads")
    if spec.attention_heads % spec.kv_heads:
        raise ValueError("attention_heads must be a multiple of kv_heads")
    if spec.head_dim % 8:
        raise ValueError("head_dim must be a multiple of 8: a quarter of it is rotated, in pairs")
    if spec.vision_depth and spec.vision_hidden_size % (4 * spec.vision_heads):
        raise ValueError("vision_hidden_size must be a multiple of 4 * vision_heads")
    if math.isqrt(spec.num_position_embeddings) ** 2 != spec.num_position_embeddings:
        raise ValueError("num_position_embeddings must be a square")
    if spec.num_experts and not 0 < spec.experts_per_token <= spec.num_experts:
        raise ValueError("experts_per_token must be between 1 and num_experts")
    if spec.dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}")


BENCHMARK_SPEC = CheckpointSpec(
    hidden_size=512,
    num_layers=8,
    intermediate_size=1536,
    vocab_size=8192,
    gdn_key_heads=4,
    gdn_value_heads=8,
    gdn_key_dim=128,
    gdn_value_dim=128,
    attention_heads=8,
    kv_heads=2,
    head_dim=128,
    vision_depth=4,
    vision_hidden_size=256,
    vision_heads=4,
    vision_intermediate_size=1024,
    patch_size=16,
    num_position_embeddings=2304,
    image_max_pixels=1024 * 1024,
)
"""The 49M-parameter model of the benchmarks: 39M weights are read per decoded token."""


def text_config(spec: CheckpointSpec) -> dict[str, Any]:
    """config.json of the language model; the whole file of a text-only checkpoint."""
    half = spec.head_dim // 8
    config: dict[str, Any] = {
        "model_type": f"{spec.model_type}_text",
        "dtype": spec.dtype,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.attention_heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "attn_output_gate": True,
        "full_attention_interval": spec.full_attention_interval,
        "linear_conv_kernel_dim": spec.conv_kernel,
        "linear_key_head_dim": spec.gdn_key_dim,
        "linear_value_head_dim": spec.gdn_value_dim,
        "linear_num_key_heads": spec.gdn_key_heads,
        "linear_num_value_heads": spec.gdn_value_heads,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": spec.rope_theta,
            "partial_rotary_factor": 0.25,
            "mrope_section": [(half + 2) // 3, (half + 1) // 3, half // 3],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": spec.tied_embeddings,
    }
    if not spec.vision_depth:
        config["architectures"] = [_architecture(spec, "ForCausalLM")]
    if spec.num_experts:
        return config | {
            "num_experts": spec.num_experts,
            "num_experts_per_tok": spec.experts_per_token,
            "moe_intermediate_size": spec.moe_intermediate_size,
            "shared_expert_intermediate_size": spec.shared_intermediate_size,
        }
    return config | {"intermediate_size": spec.intermediate_size}


def full_config(spec: CheckpointSpec, text: dict[str, Any]) -> dict[str, Any]:
    """config.json of a checkpoint with a vision tower, but for the token ids."""
    return {
        "architectures": [_architecture(spec, "ForConditionalGeneration")],
        "model_type": spec.model_type,
        "dtype": spec.dtype,
        "tie_word_embeddings": spec.tied_embeddings,
        "text_config": text,
        "vision_config": {
            "model_type": f"{spec.model_type}_vision",
            "depth": spec.vision_depth,
            "hidden_size": spec.vision_hidden_size,
            "intermediate_size": spec.vision_intermediate_size,
            "num_heads": spec.vision_heads,
            "in_channels": 3,
            "patch_size": spec.patch_size,
            "spatial_merge_size": spec.spatial_merge_size,
            "temporal_patch_size": spec.temporal_patch_size,
            "out_hidden_size": spec.hidden_size,
            "num_position_embeddings": spec.num_position_embeddings,
            "hidden_act": "gelu_pytorch_tanh",
        },
    }


def _architecture(spec: CheckpointSpec, suffix: str) -> str:
    return ("Qwen3_5Moe" if spec.num_experts else "Qwen3_5") + suffix
