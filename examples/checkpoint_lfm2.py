"""Parts specific to LFM2's checkpoints: config.json, tokens of tiles, names of weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoint_entries import Entry, layer_norm, projection
from checkpoint_parts import write_json
from checkpoint_spec import CheckpointSpec

MAX_TILES = 4
NAMED_TOKENS = {
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
}
"""Special tokens by the names under which transformers' processor looks for them."""
TILE_TOKENS = tuple(
    f"<|img_row_{row}_col_{column}|>"
    for row in range(1, MAX_TILES + 1)
    for column in range(1, MAX_TILES + 1)
)


def fields(spec: CheckpointSpec) -> dict[str, Any]:
    """Return config.json of the language model, with the fields of published files."""
    sizes: dict[str, Any] = {
        "block_ff_dim": spec.intermediate_size,
        "block_auto_adjust_ff_dim": False,
    }
    if spec.num_experts:
        sizes = {
            "intermediate_size": spec.intermediate_size,
            "moe_intermediate_size": spec.moe_intermediate_size,
            "num_dense_layers": spec.dense_layers,
            "num_experts": spec.num_experts,
            "num_experts_per_tok": spec.experts_per_token,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
        }
    return {
        **sizes,
        **({} if spec.tiled else {"architectures": [f"{spec.architecture}ForCausalLM"]}),
        "model_type": "lfm2" if spec.tiled else spec.model_type,
        **spec.text_sizes,
        "head_dim": spec.head_dim,
        "norm_eps": 1e-5,
        "rope_theta": spec.rope_theta,
        "tie_embedding": spec.tied_embeddings,
        "conv_L_cache": spec.conv_kernel,
        "conv_bias": spec.conv_bias,
        "layer_types": [
            "full_attention" if spec.attends(index) else "conv" for index in range(spec.num_layers)
        ],
    }


def vl_fields(spec: CheckpointSpec, text: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of a checkpoint with a vision tower, without the token ids."""
    return {
        "architectures": [f"{spec.architecture}ForConditionalGeneration"],
        "model_type": spec.model_type,
        "dtype": spec.dtype,
        "tie_embedding": spec.tied_embeddings,
        "text_config": text,
        "vision_config": {
            "model_type": "siglip2_vision_model",
            "num_hidden_layers": spec.vision_depth,
            "hidden_size": spec.vision_hidden_size,
            "intermediate_size": spec.vision_intermediate_size,
            "num_attention_heads": spec.vision_heads,
            "num_patches": spec.num_position_embeddings,
            "patch_size": spec.patch_size,
            "vision_use_head": False,
        },
        "downsample_factor": 2,
        "projector_hidden_size": spec.vision_intermediate_size,
        "projector_use_layernorm": spec.projector_norm,
    }


def write_processor(path: Path, spec: CheckpointSpec) -> None:
    """Write preprocessor_config.json into `path`."""
    settings = {
        "image_processor_type": "Lfm2VlImageProcessor",
        "processor_class": "Lfm2VlProcessor",
        "encoder_patch_size": spec.patch_size,
        "tile_size": spec.tile_size,
        "max_tiles": MAX_TILES,
        "min_image_tokens": 4,
        "max_image_tokens": 16,
    }
    write_json(path / "preprocessor_config.json", settings)


def vision_entries(spec: CheckpointSpec) -> Iterator[Entry]:
    """Yield the weights of the tower and of the projector."""
    dim, wide, tower = spec.vision_hidden_size, spec.vision_intermediate_size, "model.vision_tower"
    yield from projection(f"{tower}.embeddings.patch_embedding", (dim, 3 * spec.patch_size**2))
    positions = f"{tower}.embeddings.position_embedding.weight"
    yield positions, (spec.num_position_embeddings, dim), "position"
    for index in range(spec.vision_depth):
        layer = f"{tower}.encoder.layers.{index}"
        yield from layer_norm(f"{layer}.layer_norm1", dim)
        yield from layer_norm(f"{layer}.layer_norm2", dim)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from projection(f"{layer}.self_attn.{part}", (dim, dim))
        yield from projection(f"{layer}.mlp.fc1", (wide, dim))
        yield from projection(f"{layer}.mlp.fc2", (dim, wide))
    yield from layer_norm(f"{tower}.post_layernorm", dim)
    projector = "model.multi_modal_projector"
    if spec.projector_norm:
        yield from layer_norm(f"{projector}.layer_norm", 4 * dim)
    yield from projection(f"{projector}.linear_1", (wide, 4 * dim))
    yield from projection(f"{projector}.linear_2", (spec.hidden_size, wide))


def layer_entries(layer: str, index: int, spec: CheckpointSpec) -> Iterator[Entry]:
    """Yield the weights of a layer."""
    hidden, part = spec.hidden_size, f"{layer}.feed_forward"
    yield from _attention(layer, spec) if spec.attends(index) else _convolution(layer, spec)
    if spec.has_experts(index):
        yield f"{part}.gate.weight", (spec.num_experts, hidden), "router"
        yield f"{part}.expert_bias", (spec.num_experts,), "bias"
        for expert in range(spec.num_experts):
            yield from _mlp(f"{part}.experts.{expert}", hidden, spec.moe_intermediate_size)
    else:
        yield from _mlp(part, hidden, spec.intermediate_size)
    yield f"{layer}.operator_norm.weight", (hidden,), "norm"
    yield f"{layer}.ffn_norm.weight", (hidden,), "norm"


def _mlp(name: str, hidden: int, size: int) -> Iterator[Entry]:
    for part, shape in {"w1": (size, hidden), "w3": (size, hidden), "w2": (hidden, size)}.items():
        yield f"{name}.{part}.weight", shape, "linear"


def _attention(layer: str, spec: CheckpointSpec) -> Iterator[Entry]:
    hidden, dim = spec.hidden_size, spec.head_dim
    for name, heads in {"q": spec.attention_heads, "k": spec.kv_heads, "v": spec.kv_heads}.items():
        yield f"{layer}.self_attn.{name}_proj.weight", (heads * dim, hidden), "linear"
    yield f"{layer}.self_attn.out_proj.weight", (hidden, spec.attention_heads * dim), "linear"
    for name in ("q_layernorm", "k_layernorm"):
        yield f"{layer}.self_attn.{name}.weight", (dim,), "sharp_norm"


def _convolution(layer: str, spec: CheckpointSpec) -> Iterator[Entry]:
    hidden, name = spec.hidden_size, f"{layer}.conv"
    shapes = {
        "in_proj": (3 * hidden, hidden),
        "conv": (hidden, 1, spec.conv_kernel),
        "out_proj": (hidden, hidden),
    }
    for part, shape in shapes.items():
        yield f"{name}.{part}.weight", shape, "linear"
        if spec.conv_bias:
            yield f"{name}.{part}.bias", shape[:1], "bias"
