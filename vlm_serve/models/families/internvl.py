"""InternVL 3 and 3.5 in transformers' layout: Qwen2.5 or Qwen3, and InternViT over pictures in
tiles."""

from __future__ import annotations

from dataclasses import replace

from vlm_serve.errors import CheckpointError
from vlm_serve.models.config import Config, Defaults
from vlm_serve.models.families import qwen2, qwen3
from vlm_serve.models.spec import ModelSpec
from vlm_serve.models.vision_class import ClassVisionSpec
from vlm_serve.preprocess.media.processors import square_side
from vlm_serve.preprocess.text.family import INTERNVL

_TEXTS = {
    "qwen2": ("Qwen2Config", qwen2.language_model),
    "qwen3": ("Qwen3Config", qwen3.language_model),
    "qwen3_moe": ("Qwen3MoeConfig", qwen3.language_model),
}
"""The class of each language model's section, and the function that reads it."""

DEFAULTS: Defaults = {
    "Qwen2Config": qwen2.DEFAULTS["Qwen2Config"],
    **qwen3.DEFAULTS,
    "InternVLConfig": {
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": True,
    },
    "InternVLVisionConfig": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "attention_bias": False,
        "use_qk_norm": False,
        "hidden_act": "gelu",
        "norm_type": "layer_norm",
        "layer_norm_eps": 1e-6,
        "image_size": (448, 448),
        "patch_size": (14, 14),
        "num_channels": 3,
        "use_absolute_position_embeddings": True,
        "use_mean_pooling": True,
    },
}
"""Defaults of transformers' classes, for fields that a file omits."""


def spec(config: Config) -> ModelSpec:
    """Return the model of a config.json."""
    kind = config.section("text_config").raw.get("model_type", "qwen2")
    if kind not in _TEXTS:
        known = " and ".join(map(repr, _TEXTS))
        raise CheckpointError(f"the text model_type {kind!r} is not supported, only {known}")
    source, language_model = _TEXTS[kind]
    text = config.section("text_config", source)
    return replace(language_model(config, text), vision=_vision(config, text), family=INTERNVL)


def _vision(outer: Config, text: Config) -> ClassVisionSpec:
    config = outer.section("vision_config")
    config.allow("model_type", "internvl_vision")
    config.expect("hidden_act", "gelu")
    config.expect("layer_norm_eps", 1e-6)
    config.expect("use_absolute_position_embeddings", True)
    config.expect("use_mean_pooling", True)
    outer.expect("projector_hidden_act", "gelu")
    outer.expect("downsample_ratio", 0.5)
    outer.expect("vision_feature_layer", -1)
    outer.expect("vision_feature_select_strategy", "default")
    norm, sides = config.given("norm_type"), ("patch_size", "image_size")
    patch, picture = (square_side(name, config.given(name)) for name in sides)
    if norm not in ("layer_norm", "rms_norm"):
        raise CheckpointError(f"norm_type {norm!r} is not supported")
    if picture % patch:
        raise CheckpointError(f"image_size {picture} is no multiple of patch_size {patch}")
    sizes = ClassVisionSpec(
        depth=config.size("num_hidden_layers"),
        hidden_size=config.size("hidden_size"),
        intermediate_size=config.size("intermediate_size"),
        heads=config.size("num_attention_heads"),
        in_channels=config.size("num_channels"),
        patch_size=patch,
        side=picture // patch,
        merge_size=2,
        out_hidden_size=text.size("hidden_size"),
        projector_size=text.size("hidden_size"),
        biased=bool(config.given("attention_bias")),
        centred=norm == "layer_norm",
        qk_norms=bool(config.given("use_qk_norm")),
    )
    if sizes.hidden_size % sizes.heads:
        raise CheckpointError(
            f"the vision hidden_size {sizes.hidden_size} is no multiple of num_attention_heads "
            f"{sizes.heads}"
        )
    return sizes
