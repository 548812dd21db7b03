"""The config.json of a random checkpoint."""

from __future__ import annotations

from typing import Any

import checkpoint_internvl
import checkpoint_minicpm
import checkpoint_qwen2
from checkpoint_lfm2 import fields as lfm2_fields
from checkpoint_lfm2 import vl_fields
from checkpoint_mamba import fields as mamba_fields
from checkpoint_spec import CheckpointSpec


def text_config(spec: CheckpointSpec) -> dict[str, Any]:
    """Return config.json of the language model; for text-only checkpoints the whole file."""
    if spec.family == "lfm2":
        return lfm2_fields(spec)
    if spec.mamba:
        return mamba_fields(spec)
    alone = spec.kin in ("qwen3_next", "qwen3", "qwen2")
    kind = spec.text_family or (spec.model_type if alone else f"{spec.model_type}_text")
    if spec.family == "cosmos3_omni":
        kind = "qwen3_vl_text"
    if spec.sliced:
        kind = "qwen3_5_text"
    config: dict[str, Any] = {
        "model_type": kind,
        **spec.text_sizes,
        **({} if spec.older else {"head_dim": spec.head_dim}),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        **_rotation(spec),
        "tie_word_embeddings": spec.tied_embeddings,
    }
    if not spec.vision_depth:
        config["architectures"] = [f"{spec.architecture}ForCausalLM"]
    if spec.hybrid:
        config |= _gated_delta(spec)
    return config | (_experts(spec) if spec.num_experts else {}) | _dense(spec)


def _rotation(spec: CheckpointSpec) -> dict[str, Any]:
    """Return the rotary settings, placed and named as in each family's published files."""
    if spec.family == "qwen3_next":
        return {"rope_theta": spec.rope_theta, "rope_scaling": None, "partial_rotary_factor": 0.25}
    if spec.kin in ("qwen3", "qwen2"):
        return {"rope_theta": spec.rope_theta, "rope_scaling": None}
    if spec.older:
        half = spec.head_dim // 2
        sections = [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]
        return {
            "rope_theta": spec.rope_theta,
            "rope_scaling": {"type": "mrope", "mrope_section": sections},
        }
    half = spec.head_dim // (2 if spec.kin == "qwen3_vl" else 8)
    kind = {
        "rope_type": "default",
        "mrope_section": [(half + 2) // 3, (half + 1) // 3, half // 3],
        "mrope_interleaved": True,
    }
    if spec.kin == "qwen3_vl":
        return {"rope_theta": spec.rope_theta, "rope_scaling": kind}
    share = {"rope_theta": spec.rope_theta, "partial_rotary_factor": 0.25}
    if spec.family in ("minicpmv4_6", "minicpm_ocr"):  # Equal weights for all axes.
        return {"rope_parameters": {"rope_type": "default"} | share}
    return {"rope_parameters": kind | share}


def _gated_delta(spec: CheckpointSpec) -> dict[str, Any]:
    gated: dict[str, Any] = {"attn_output_gate": True} if spec.family == "qwen3_5" else {}
    # Published files of Qwen3-Next have the layer without this field.
    gated |= {"mtp_num_hidden_layers": 1} if spec.mtp and spec.family == "qwen3_5" else {}
    return gated | {
        "full_attention_interval": spec.full_attention_interval,
        "linear_conv_kernel_dim": spec.conv_kernel,
        "linear_key_head_dim": spec.gdn_key_dim,
        "linear_value_head_dim": spec.gdn_value_dim,
        "linear_num_key_heads": spec.gdn_key_heads,
        "linear_num_value_heads": spec.gdn_value_heads,
        "mamba_ssm_dtype": "float32",
    }


def _experts(spec: CheckpointSpec) -> dict[str, Any]:
    config: dict[str, Any] = {
        "num_experts": spec.num_experts,
        "num_experts_per_tok": spec.experts_per_token,
        "moe_intermediate_size": spec.moe_intermediate_size,
    }
    if spec.hybrid:
        config["shared_expert_intermediate_size"] = spec.shared_intermediate_size
    if spec.family != "qwen3_5":
        config |= {
            "norm_topk_prob": True,
            "decoder_sparse_step": spec.sparse_step,
            "mlp_only_layers": list(range(spec.dense_layers)),
        }
    return config


def _dense(spec: CheckpointSpec) -> dict[str, Any]:
    if all(map(spec.has_experts, range(spec.num_layers))):
        return {}
    return {"intermediate_size": spec.intermediate_size}


def full_config(spec: CheckpointSpec, text: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of a checkpoint with a vision tower, without the token ids."""
    if spec.family == "internvl":
        return checkpoint_internvl.fields(spec, text)
    if spec.tiled:
        return vl_fields(spec, text)
    whole: dict[str, Any] = {
        "architectures": [f"{spec.architecture}ForConditionalGeneration"],
        "model_type": spec.model_type,
        "dtype": spec.dtype,
        "tie_word_embeddings": spec.tied_embeddings,
    }
    if spec.older:  # Published files have the fields of the language model beside the tower's.
        return text | whole | {"vision_config": checkpoint_qwen2.vision_fields(spec)}
    if spec.sliced:
        return whole | {"text_config": text, **checkpoint_minicpm.vision_fields(spec)}
    return whole | {"text_config": text, "vision_config": _vision(spec)}


def _vision(spec: CheckpointSpec) -> dict[str, Any]:
    kind = f"{spec.model_type.replace(spec.family, spec.kin)}_vision"
    if spec.family == "qwen3_omni":
        kind = f"{spec.model_type}_vision_encoder"
    vision = {
        "model_type": kind,
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
    }
    if spec.kin == "qwen3_vl":
        vision["deepstack_visual_indexes"] = spec.deepstack
    return vision
