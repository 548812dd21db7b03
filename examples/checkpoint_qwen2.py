"""Parts specific to Qwen2-VL's and Qwen2.5-VL's checkpoints: processors, vision tower."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoint_entries import Entry, layer_norm, projection
from checkpoint_parts import write_json
from checkpoint_spec import CheckpointSpec


def vision_fields(spec: CheckpointSpec) -> dict[str, Any]:
    """Return `vision_config` of config.json."""
    shared = {
        "model_type": spec.model_type,
        "depth": spec.vision_depth,
        "num_heads": spec.vision_heads,
        "in_chans": 3,
        "patch_size": spec.patch_size,
        "spatial_merge_size": spec.spatial_merge_size,
        "spatial_patch_size": spec.patch_size,
        "temporal_patch_size": spec.temporal_patch_size,
    }
    if spec.family == "qwen2_vl":
        return shared | {
            "embed_dim": spec.vision_hidden_size,
            "mlp_ratio": spec.vision_intermediate_size // spec.vision_hidden_size,
            "hidden_size": spec.hidden_size,
        }
    return shared | {
        "hidden_act": "silu",
        "hidden_size": spec.vision_hidden_size,
        "intermediate_size": spec.vision_intermediate_size,
        "out_hidden_size": spec.hidden_size,
        # Three tokens a side, so that windows at edges are smaller.
        "window_size": 3 * spec.spatial_merge_size * spec.patch_size,
        "fullatt_block_indexes": [spec.vision_depth - 1],
        "tokens_per_second": 2,
    }


def write_processors(path: Path, spec: CheckpointSpec) -> None:
    """Write preprocessor_config.json and video_preprocessor_config.json into `path`. Pixels of a
    video are those of a frame."""
    shared = {
        "processor_class": f"{spec.architecture}Processor",
        "patch_size": spec.patch_size,
        "temporal_patch_size": spec.temporal_patch_size,
        "merge_size": spec.spatial_merge_size,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    images = shared | {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": spec.image_min_pixels,
        "max_pixels": spec.image_max_pixels,
    }
    videos = shared | {
        "video_processor_type": "Qwen2VLVideoProcessor",
        "size": {
            "shortest_edge": spec.video_min_pixels // 2,
            "longest_edge": spec.video_max_pixels // 64,
        },
        "fps": 2.0,
        "do_sample_frames": True,
    }
    write_json(path / "preprocessor_config.json", images)
    write_json(path / "video_preprocessor_config.json", videos)


def vision_entries(spec: CheckpointSpec) -> Iterator[Entry]:
    """Yield names, shapes and rules of the weights of the vision tower."""
    dim, wide = spec.vision_hidden_size, spec.vision_intermediate_size
    gated, merged = spec.family == "qwen2_5_vl", dim * spec.spatial_merge_size**2
    patch = (dim, 3, spec.temporal_patch_size, spec.patch_size, spec.patch_size)
    yield "visual.patch_embed.proj.weight", patch, "linear"
    for index in range(spec.vision_depth):
        block = f"visual.blocks.{index}"
        yield from layer_norm(f"{block}.norm1", dim, bias=not gated)
        yield from layer_norm(f"{block}.norm2", dim, bias=not gated)
        yield from projection(f"{block}.attn.qkv", (3 * dim, dim))
        yield from projection(f"{block}.attn.proj", (dim, dim))
        for name in ("gate_proj", "up_proj") if gated else ("fc1",):
            yield from projection(f"{block}.mlp.{name}", (wide, dim))
        yield from projection(f"{block}.mlp.{'down_proj' if gated else 'fc2'}", (dim, wide))
    yield from layer_norm("visual.merger.ln_q", dim, bias=not gated)
    yield from projection("visual.merger.mlp.0", (merged, merged))
    yield from projection("visual.merger.mlp.2", (spec.hidden_size, merged))
