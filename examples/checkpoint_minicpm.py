"""Parts specific to MiniCPM-V's checkpoints: tokens of slices, processors, vision tower."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoint_entries import Entry, layer_norm, projection
from checkpoint_parts import token_id, write_json
from checkpoint_spec import CheckpointSpec
from tokenizers import Tokenizer

NAMED_TOKENS = {
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
"""Special tokens by the names under which transformers' processor looks for them."""


def vision_fields(spec: CheckpointSpec) -> dict[str, Any]:
    """Return the vision fields of config.json."""
    side = math.isqrt(spec.num_position_embeddings)
    return {
        "vision_config": {
            "model_type": f"{spec.model_type}_vision",
            "num_hidden_layers": spec.vision_depth,
            "hidden_size": spec.vision_hidden_size,
            "intermediate_size": spec.vision_intermediate_size,
            "num_attention_heads": spec.vision_heads,
            "image_size": side * spec.patch_size,
            "patch_size": spec.patch_size,
        },
        "insert_layer_id": spec.window_layer,
        "downsample_mode": spec.downsample_mode,
    }


def token_ids(spec: CheckpointSpec, tokenizer: Tokenizer) -> dict[str, int]:
    """Return the token ids of config.json; version 4.7 has those of its canvas."""
    fields = {
        "image_token_id": token_id(tokenizer, "<|image_pad|>"),
        "video_token_id": token_id(tokenizer, "<|video_pad|>"),
    }
    if spec.family == "minicpmv4_7":
        fields |= {
            f"{name}_id": token_id(tokenizer, NAMED_TOKENS[f"{name}_token"])
            for name in ("image_start", "image_end", "slice_start", "slice_end")
        }
        fields["newline_id"] = tokenizer.encode("\n", add_special_tokens=False).ids[0]
    return fields


def write_processors(path: Path, spec: CheckpointSpec) -> None:
    """Write preprocessor_config.json and video_preprocessor_config.json into `path`."""
    shared = {
        "processor_class": f"{spec.architecture}Processor",
        "max_slice_nums": spec.max_slices,
        "scale_resolution": spec.slice_resolution,
        "patch_size": spec.patch_size,
        "downsample_mode": spec.downsample_mode,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    # Version 4.7 has those of 4.6.
    kind = "MiniCPMOcr" if spec.family == "minicpm_ocr" else "MiniCPMV4_6"
    images = shared | {"image_processor_type": f"{kind}ImageProcessor"}
    videos = shared | {
        "video_processor_type": f"{kind}VideoProcessor",
        "max_num_frames": spec.max_video_frames,
    }
    write_json(path / "preprocessor_config.json", images)
    write_json(path / "video_preprocessor_config.json", videos)


def vision_entries(spec: CheckpointSpec) -> Iterator[Entry]:
    """Yield names, shapes and rules of the weights of the vision tower and the mergers."""
    dim, wide = spec.vision_hidden_size, spec.vision_intermediate_size
    tower, flat = "model.vision_tower", 4 * spec.vision_hidden_size
    patch = (dim, 3, spec.patch_size, spec.patch_size)
    yield from projection(f"{tower}.embeddings.patch_embedding", patch)
    places = (spec.num_position_embeddings, dim)
    yield f"{tower}.embeddings.position_embedding.weight", places, "position"
    for index in range(spec.vision_depth):
        layer = f"{tower}.encoder.layers.{index}"
        yield from layer_norm(f"{layer}.layer_norm1", dim)
        yield from _attention(layer, dim)
        yield from layer_norm(f"{layer}.layer_norm2", dim)
        yield from projection(f"{layer}.mlp.fc1", (wide, dim))
        yield from projection(f"{layer}.mlp.fc2", (dim, wide))
    yield from layer_norm(f"{tower}.post_layernorm", dim)
    yield from layer_norm(f"{tower}.vit_merger.layer_norm1", dim)
    yield from _attention(f"{tower}.vit_merger", dim)
    yield from _merging(f"{tower}.vit_merger", flat, 4 * wide, dim)
    yield from _merging("model.merger.mlp.0", flat, flat, spec.hidden_size)


def _attention(layer: str, dim: int) -> Iterator[Entry]:
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        yield from projection(f"{layer}.self_attn.{name}", (dim, dim))


def _merging(name: str, flat: int, wide: int, out: int) -> Iterator[Entry]:
    yield from layer_norm(f"{name}.pre_norm", flat)
    yield from projection(f"{name}.linear_1", (wide, flat))
    yield from projection(f"{name}.linear_2", (out, wide))
