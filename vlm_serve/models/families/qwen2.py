"""Qwen2, Qwen2-VL and Qwen2.5-VL: attention without gates and norms, whose queries, keys and values
have biases; and vision towers with positions by rotation alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.models.config import Config, Defaults
from vlm_serve.models.families import shared
from vlm_serve.models.spec import ModelSpec
from vlm_serve.models.vision_rotary import RotaryVisionSpec
from vlm_serve.preprocess.text.family import family_of

_TEXT: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": shared.quotient_head_dim,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}
_SEEING: dict[str, Any] = _TEXT | {
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
    "Qwen2Config": _TEXT
    | {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    },
    "Qwen2VLTextConfig": _SEEING,
    "Qwen2_5_VLTextConfig": _SEEING,
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
    """Return the model of a config.json."""
    kind = config.raw["model_type"]
    if kind not in ("qwen2_vl", "qwen2_5_vl"):
        return language_model(config, config, sections=kind != "qwen2")
    model = language_model(config, _text(config), sections=True)
    return replace(model, vision=_tower(config))


def language_model(config: Config, text: Config, *, sections: bool = False) -> ModelSpec:
    """Return the model whose language part is the section `text` of a config.json; `sections`: its
    positions have three axes."""
    text.allow("head_dim", shared.quotient_head_dim(text))
    mixer = shared.plain_attention(text, norms=False)
    layers = [(mixer, shared.mlp(text))] * text.size("num_hidden_layers")
    rope = shared.rope(text, partial=False, sections=sections, interleaved=False)
    family = family_of(config.raw["model_type"])
    return shared.model(config, text, layers, rope, family=family, centred=False)


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
