"""LFM2-VL and LFM2.5-VL: LFM2, and SigLIP 2 over pictures in tiles."""

from __future__ import annotations

import math
from dataclasses import replace

from vlm_serve.errors import CheckpointError
from vlm_serve.models.config import Config, Defaults
from vlm_serve.models.families import lfm2
from vlm_serve.models.spec import ModelSpec
from vlm_serve.models.vision_unshuffled import UnshuffledVisionSpec
from vlm_serve.preprocess.text.family import LFM2_VL

DEFAULTS: Defaults = {
    **lfm2.DEFAULTS,
    "Lfm2VlConfig": {
        "downsample_factor": 2,
        "projector_bias": True,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": 2560,
        "projector_use_layernorm": True,
        "tie_word_embeddings": True,
    },
    "Siglip2VisionConfig": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_channels": 3,
        "num_patches": 256,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
}
"""Defaults of transformers' classes, for fields that a file omits."""


def spec(config: Config) -> ModelSpec:
    """Return the model of a config.json."""
    text = config.section("text_config", "Lfm2Config")
    text.expect("model_type", "lfm2")
    model = lfm2.language_model(config, text, lfm2.dense_layers(text))
    tied = lfm2.tied_embeddings(config)
    return replace(model, vision=_vision(config, text), family=LFM2_VL, tied_embeddings=tied)


def _vision(outer: Config, text: Config) -> UnshuffledVisionSpec:
    config = outer.section("vision_config", "Siglip2VisionConfig")
    config.allow("model_type", "siglip2_vision_model")
    config.expect("hidden_act", "gelu_pytorch_tanh")
    config.expect("layer_norm_eps", 1e-6)
    outer.expect("projector_hidden_act", "gelu")
    outer.expect("projector_bias", True)
    outer.expect("downsample_factor", 2)
    outer.allow("vision_feature_layer", -1)
    positions = config.size("num_patches")
    sizes = UnshuffledVisionSpec(
        depth=config.size("num_hidden_layers"),
        hidden_size=config.size("hidden_size"),
        intermediate_size=config.size("intermediate_size"),
        heads=config.size("num_attention_heads"),
        in_channels=config.size("num_channels"),
        patch_size=config.size("patch_size"),
        side=math.isqrt(positions),
        merge_size=2,
        out_hidden_size=text.size("hidden_size"),
        projector_size=outer.size("projector_hidden_size"),
        normed=bool(outer.given("projector_use_layernorm")),
    )
    if sizes.hidden_size % sizes.heads:
        raise CheckpointError(
            f"the vision hidden_size {sizes.hidden_size} is no multiple of num_attention_heads "
            f"{sizes.heads}"
        )
    if sizes.side**2 != positions:
        raise CheckpointError(f"num_patches {positions} is no square")
    return sizes
