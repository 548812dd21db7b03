"""Qwen2-VL and Qwen2.5-VL: Qwen2 with positions on three axes, and vision towers with positions by
rotation alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.models.config import Config, Defaults
from vlm_serve.models.families import qwen2, shared
from vlm_serve.models.spec import ModelSpec
from vlm_serve.models.vision_rotary import RotaryVisionSpec

_TEXT: dict[str, Any] = qwen2.TEXT | {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    # Of the models' rotary embeddings.
    "mrope_section": [16, 24, 24],
    # Alone, the classes say nothing of them.
    "tie_word_embeddings": False,
}
_VISION: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
DEFAULTS: Defaults = {
    "Qwen2VLTextConfig": _TEXT,
    "Qwen2_5_VLTextConfig": _TEXT,
    "Qwen2VLVisionConfig": _VISION
    | {"embed_dim": 1280, "mlp_ratio": 4, "hidden_act": "quick_gelu"},
    "Qwen2_5_VLVisionConfig": _VISION
    | {
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "window_size": 112,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": (7, 15, 23, 31),
    },
}
"""Defaults of transformers' classes, for fields that a file omits."""


def spec(config: Config) -> ModelSpec:
    """Return the model of a config.json, with a tower or without."""
    if config.raw["model_type"].endswith("_text"):
        return qwen2.language_model(config, config, sections=True)
    model = qwen2.language_model(config, _text(config), sections=True)
    return replace(model, vision=_tower(config))


def _text(config: Config) -> Config:
    """Return the language model's section; published files have its fields beside the tower's."""
    if config.raw.get("text_config"):
        return shared.text_section(config)
    prefix = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}[config.raw["model_type"]]
    return config.viewed(f"{prefix}TextConfig")


def _tower(outer: Config) -> RotaryVisionSpec:
    """Return the vision tower. Qwen2-VL's config calls the decoder's width `hidden_size`."""
    kind, config = outer.raw["model_type"], outer.section("vision_config")
    gated, patch = kind == "qwen2_5_vl", config.size("patch_size")
    config.allow("model_type", f"{kind}_vision", kind)
    config.expect("hidden_act", "silu" if gated else "quick_gelu")
    config.allow("in_chans", config.size("in_channels"))
    config.allow("spatial_patch_size", patch)
    hidden = config.size("hidden_size" if gated else "embed_dim")
    wide = 0 if gated else int(hidden * config.positive("mlp_ratio"))
    merge = config.size("spatial_merge_size")
    window, whole = _windows(config, merge * patch) if gated else (0, frozenset[int]())
    tower = RotaryVisionSpec(
        depth=config.size("depth"),
        hidden_size=hidden,
        intermediate_size=wide or config.size("intermediate_size"),
        heads=config.size("num_heads"),
        in_channels=config.size("in_channels"),
        patch_size=patch,
        temporal_patch_size=config.size("temporal_patch_size"),
        merge_size=merge,
        out_hidden_size=config.size("out_hidden_size" if gated else "hidden_size"),
        rope_theta=shared.axial_theta(config),
        gated=gated,
        window=window,
        whole=whole,
    )
    shared.check_axial_heads(tower)
    return tower


def _windows(config: Config, token: int) -> tuple[int, frozenset[int]]:
    """Return tokens per side of a window, and the layers without; `token`: a token's pixels."""
    size, whole = config.size("window_size"), config.given("fullatt_block_indexes")
    if size % token:
        raise CheckpointError(f"window_size {size} is no multiple of a token's {token} pixels")
    if not isinstance(whole, list | tuple) or not all(type(index) is int for index in whole):
        raise CheckpointError(f"fullatt_block_indexes must be a list of layers, not {whole!r}")
    return size // token, frozenset(whole)
