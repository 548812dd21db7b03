"""Write a trained model as a checkpoint that transformers and vlm-serve load unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from checkpoint_parts import (
    media_token_ids,
    token_id,
    write_generation_config,
    write_json,
    write_processor_files,
    write_tokenizer_files,
)
from demo_chat import MEDIA, PATCH, VIDEO_CELLS, demo_template
from demo_model import DemoModel
from demo_mtp import Drafter
from demo_shape import DemoShape
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

CONTEXT = 32_768


def text_config(shape: DemoShape, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the language model's part of config.json."""
    end, pad = token_id(tokenizer, "<|im_end|>"), token_id(tokenizer, "<|endoftext|>")
    sparse = bool(shape.experts)
    sizes: dict[str, Any] = {"intermediate_size": shape.intermediate}
    if sparse:
        sizes = {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.expert_intermediate,
            "shared_expert_intermediate_size": shape.intermediate,
        }
    layers = ["linear_attention", "full_attention"]
    return {
        "model_type": "qwen3_5_moe_text" if sparse else "qwen3_5_text",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        **sizes,
        "num_hidden_layers": shape.layers,
        "layer_types": [layers[shape.is_attention(i)] for i in range(shape.layers)],
        "full_attention_interval": shape.attention_every,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "attn_output_gate": True,
        "hidden_act": "silu",
        "linear_conv_kernel_dim": shape.conv_kernel,
        "linear_key_head_dim": shape.state_dim,
        "linear_value_head_dim": shape.state_dim,
        "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "partial_rotary_factor": shape.rope_dims / shape.head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.rope_dims / shape.head_dim,
            "mrope_section": list(shape.rope_sections),
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "eos_token_id": end,
        "pad_token_id": pad,
        "dtype": "bfloat16",
    }


def vision_config(shape: DemoShape) -> dict[str, Any]:
    """Return the vision tower's part of config.json."""
    return {
        "model_type": "qwen3_5_moe_vision" if shape.experts else "qwen3_5_vision",
        "depth": shape.vision_depth,
        "hidden_size": shape.vision_hidden,
        "intermediate_size": shape.vision_intermediate,
        "num_heads": shape.vision_heads,
        "in_channels": 3,
        "patch_size": PATCH,
        "spatial_merge_size": shape.merge,
        "temporal_patch_size": 2,
        "out_hidden_size": shape.hidden,
        "num_position_embeddings": shape.vision_grid**2,
        "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": [],
    }


def model_config(shape: DemoShape, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return config.json."""
    family = "Qwen3_5Moe" if shape.experts else "Qwen3_5"
    return {
        "architectures": [f"{family}ForConditionalGeneration"],
        "model_type": "qwen3_5_moe" if shape.experts else "qwen3_5",
        "text_config": text_config(shape, tokenizer),
        "vision_config": vision_config(shape),
        **media_token_ids(tokenizer),
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def weights(model: DemoModel, drafter: Drafter | None) -> dict[str, Tensor]:
    """Return bfloat16 weights under their published names."""
    found = dict(model.state_dict())
    if drafter is not None:
        found |= {f"mtp.{name}": tensor for name, tensor in drafter.state_dict().items()}
    return {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in found.items()}


def export(
    model: DemoModel, tokenizer: Tokenizer, path: Path, drafter: Drafter | None = None
) -> None:
    """Write weights, configuration, tokenizer, template and processor files into `path`."""
    path.mkdir(parents=True, exist_ok=True)
    file = path / "model.safetensors"
    save_file(weights(model, drafter), str(file), metadata={"format": "pt"})
    file.chmod(0o644)
    config = model_config(model.shape, tokenizer)
    if drafter is not None:
        config["text_config"]["mtp_num_hidden_layers"] = len(drafter.layers)
    write_json(path / "config.json", config)
    write_tokenizer_files(path, tokenizer, max_length=CONTEXT)
    (path / "chat_template.jinja").write_text(demo_template(), encoding="utf-8")
    write_generation_config(path, tokenizer)
    write_processor_files(path, MEDIA)
    video = path / "video_preprocessor_config.json"
    write_json(video, json.loads(video.read_text()) | {"max_video_tokens": VIDEO_CELLS})
