"""Parts specific to InternVL's checkpoints: config.json, processor, vision tower."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoint_entries import Entry, layer_norm, projection
from checkpoint_parts import write_json
from checkpoint_spec import CheckpointSpec

MAX_TILES = 4
NAMED_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
"""Special tokens by the names under which transformers' processor looks for them."""


def fields(spec: CheckpointSpec, text: dict[str, Any]) -> dict[str, Any]:
    """Return config.json, without the token ids."""
    side = spec.patch_size * math.isqrt(spec.num_position_embeddings)
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": spec.model_type,
        "dtype": spec.dtype,
        "tie_word_embeddings": spec.tied_embeddings,
        "text_config": text,
        "vision_config": {
            "model_type": "internvl_vision",
            "num_hidden_layers": spec.vision_depth,
            "hidden_size": spec.vision_hidden_size,
            "intermediate_size": spec.vision_intermediate_size,
            "num_attention_heads": spec.vision_heads,
            "attention_bias": not spec.large_tower,
            "norm_type": "rms_norm" if spec.large_tower else "layer_norm",
            "use_qk_norm": spec.large_tower,
            "image_size": [side, side],
            "patch_size": [spec.patch_size, spec.patch_size],
        },
        "downsample_ratio": 0.5,
        "image_seq_length": _tile_tokens(spec),
    }


def write_processor(path: Path, spec: CheckpointSpec) -> None:
    """Write the files of the image processor, the video processor and the processor into `path`."""
    settings = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "processor_class": "InternVLProcessor",
        # As in published files; the processor cuts all the same.
        "crop_to_patches": False,
        "size": {"height": spec.tile_size, "width": spec.tile_size},
        "min_patches": 1,
        "max_patches": MAX_TILES,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    write_json(path / "preprocessor_config.json", settings)
    videos = {
        name: settings[name] for name in ("processor_class", "size", "image_mean", "image_std")
    }
    videos["video_processor_type"] = "InternVLVideoProcessor"
    write_json(path / "video_preprocessor_config.json", videos)
    write_json(
        path / "processor_config.json",
        {"processor_class": "InternVLProcessor", "image_seq_length": _tile_tokens(spec)},
    )


def _tile_tokens(spec: CheckpointSpec) -> int:
    return (spec.tile_size // (2 * spec.patch_size)) ** 2


def vision_entries(spec: CheckpointSpec) -> Iterator[Entry]:
    """Yield the weights of the tower and of the projector."""
    dim, wide, tower = spec.vision_hidden_size, spec.vision_intermediate_size, "model.vision_tower"
    large, start = spec.large_tower, f"{tower}.embeddings"
    yield f"{start}.cls_token", (1, 1, dim), "position"
    yield f"{start}.position_embeddings", (1, 1 + spec.num_position_embeddings, dim), "position"
    patch = (dim, 3, spec.patch_size, spec.patch_size)
    yield from projection(f"{start}.patch_embeddings.projection", patch)
    for index in range(spec.vision_depth):
        layer = f"{tower}.encoder.layer.{index}"
        yield from layer_norm(f"{layer}.layernorm_before", dim, bias=not large)
        yield from layer_norm(f"{layer}.layernorm_after", dim, bias=not large)
        for part in ("q_proj", "k_proj", "v_proj"):
            yield from projection(f"{layer}.attention.{part}", (dim, dim), bias=not large)
        for part in ("q_norm", "k_norm") if large else ():
            yield from layer_norm(f"{layer}.attention.{part}", dim, bias=False)
        yield from projection(f"{layer}.attention.projection_layer", (dim, dim))
        yield from projection(f"{layer}.mlp.fc1", (wide, dim))
        yield from projection(f"{layer}.mlp.fc2", (dim, wide))
        for part in ("lambda_1", "lambda_2"):
            yield f"{layer}.{part}", (dim,), "norm"
    projector = "model.multi_modal_projector"
    yield from layer_norm(f"{projector}.layer_norm", 4 * dim)
    yield from projection(f"{projector}.linear_1", (spec.hidden_size, 4 * dim))
    yield from projection(f"{projector}.linear_2", (spec.hidden_size, spec.hidden_size))
