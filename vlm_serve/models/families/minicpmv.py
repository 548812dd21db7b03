"""MiniCPM-V 4.6 and 4.7 and MiniCPM-OCR: Qwen3.5's language model, and a vision tower that cuts
pictures into slices. They differ in media positions: 4.7 lays slices out on a canvas, the others
count tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.models.config import Config, Defaults
from vlm_serve.models.families import qwen3_5, shared
from vlm_serve.models.spec import ModelSpec
from vlm_serve.models.vision_windows import WindowVisionSpec
from vlm_serve.preprocess.media.processors import MERGES
from vlm_serve.preprocess.text.family import family_of

_WHOLE: dict[str, Any] = {
    "downsample_mode": "16x",
    "insert_layer_id": 6,
    "tie_word_embeddings": False,
}
_VISION: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
}
DEFAULTS: Defaults = {
    **qwen3_5.DEFAULTS,
    "MiniCPMV4_6Config": _WHOLE,
    "MiniCPMV4_7Config": _WHOLE,
    "MiniCPMOcrConfig": _WHOLE | {"downsample_mode": "4x", "tie_word_embeddings": True},
    "MiniCPMV4_6VisionConfig": _VISION,
    "MiniCPMV4_7VisionConfig": _VISION,
    "MiniCPMOcrVisionConfig": _VISION,
}
"""Defaults of transformers' classes, for fields that a file omits."""


def spec(config: Config) -> ModelSpec:
    """Return the model of a config.json."""
    text = config.section("text_config", "Qwen3_5TextConfig")
    text.expect("model_type", "qwen3_5_text")
    family = family_of(config.raw["model_type"])
    rope = shared.rope(text, partial=True, sections=family.positions == "canvas")
    model = qwen3_5.language_model(config, text, None, rope)
    return replace(model, vision=_vision(config, text), family=family)


def _vision(outer: Config, text: Config) -> WindowVisionSpec:
    config = outer.section("vision_config")
    config.allow("model_type", f"{outer.raw['model_type']}_vision", "minicpmv4_6_vision")
    config.allow("hidden_act", "gelu_pytorch_tanh")
    config.allow("layer_norm_eps", 1e-6)
    config.allow("window_kernel_size", [2, 2])
    outer.allow("merge_kernel_size", [2, 2])
    outer.allow("merger_times", 1)
    outer.allow("drop_vision_last_layer", False)
    mode, merged = outer.given("downsample_mode"), outer.given("insert_layer_id")
    if not isinstance(mode, str) or mode not in MERGES:
        raise CheckpointError(f"downsample_mode {mode!r} is not supported, only '16x' and '4x'")
    sizes = WindowVisionSpec(
        depth=config.size("num_hidden_layers"),
        hidden_size=config.size("hidden_size"),
        intermediate_size=config.size("intermediate_size"),
        heads=config.size("num_attention_heads"),
        in_channels=config.size("num_channels"),
        patch_size=config.size("patch_size"),
        side=config.size("image_size") // config.size("patch_size"),
        merged_layer=merged,
        merge_size=MERGES[mode],
        out_hidden_size=text.size("hidden_size"),
    )
    if sizes.hidden_size % sizes.heads:
        raise CheckpointError(
            f"the vision hidden_size {sizes.hidden_size} is no multiple of num_attention_heads "
            f"{sizes.heads}"
        )
    if not sizes.side:
        raise CheckpointError(f"image_size {config.size('image_size')} is less than a patch")
    if type(merged) is not int or not 0 <= merged < sizes.depth:
        raise CheckpointError(
            f"insert_layer_id {merged!r} is none of the {sizes.depth} vision layers"
        )
    return sizes
