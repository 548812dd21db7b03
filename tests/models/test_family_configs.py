"""What each family reads of config.json, and that it refuses what it does not know by field and
value, before any weight is read."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_config import full_config, text_config
from checkpoint_spec import CheckpointSpec
from families import FAMILIES as SHAPES
from families import SPECS

from vlm_serve.errors import CheckpointError
from vlm_serve.models.families.lfm2 import PARTS
from vlm_serve.models.parts.attention import Attention
from vlm_serve.models.parts.base import Routing
from vlm_serve.models.parts.feed_forward import UNGATED, Experts, Mlp
from vlm_serve.models.parts.gated_delta import GatedDelta
from vlm_serve.models.parts.mamba2 import Mamba2
from vlm_serve.models.parts.short_conv import ShortConv
from vlm_serve.models.registry import FAMILIES, spec_of
from vlm_serve.models.spec import NORMS, Scales
from vlm_serve.models.vision_class import ClassVisionSpec
from vlm_serve.models.vision_rotary import RotaryVisionSpec
from vlm_serve.models.vision_unshuffled import UnshuffledVisionSpec
from vlm_serve.models.vision_windows import WindowVisionSpec
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline


def config_of(spec: CheckpointSpec) -> dict[str, Any]:
    text = text_config(spec)
    return full_config(spec, text) if spec.vision_depth else text


def config(kind: str, **changes: Any) -> dict[str, Any]:
    """Of a model type, with other fields of the language model."""
    made = config_of(next(iter(SHAPES[kind].values())))
    (made.get("text_config") or made).update(changes)
    return made


def test_random_checkpoints_exist_of_all_that_is_registered() -> None:
    assert SHAPES.keys() == FAMILIES.keys()
    for kind, shapes in SHAPES.items():
        assert {config_of(spec)["model_type"] for spec in shapes.values()} == {kind}


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_registry_says_what_a_model_gets(kind: str) -> None:
    spec, served = spec_of(config(kind)), FAMILIES[kind]
    assert (spec.vision is not None) == bool(served.media)
    assert spec.cache_layout().has_state == served.state
    assert (spec.routing is not None) == served.experts


def test_qwen3_vl() -> None:
    spec = spec_of(config("qwen3_vl"))
    assert {layer.mixers[0] for layer in spec.layers} == {Attention(4, 2, 32, gated=False)}
    assert {layer.feed_forwards[0] for layer in spec.layers} == {Mlp(128)}
    assert not spec.norm.centred
    assert (spec.rope.rotary_dim, spec.rope.sections) == (32, (6, 5, 5))
    assert spec.vision is not None and spec.vision.deepstack == (1, 2)
    assert (spec.media_features, spec.embedding_width) == (2, 3 * 64)


def test_qwen3_vl_moe_mixes_dense_layers_in() -> None:
    spec = spec_of(config_of(SPECS["vl moe, every second layer dense"]))
    experts = Experts(Routing(6, 2), 32, shared=0, transposed=True)
    found = [layer.feed_forwards[0] for layer in spec.layers]
    assert found == [Mlp(128), Mlp(128), Mlp(128), experts, Mlp(128), experts]
    assert spec.expert_layers == 2


def test_qwen3_next() -> None:
    spec = spec_of(config_of(SPECS["next, three value heads, dense layers"]))
    delta, attention = spec.layers[0].mixers[0], spec.layers[3].mixers[0]
    assert isinstance(delta, GatedDelta) and delta.interleaved
    assert attention == Attention(4, 2, 32)
    kinds = [type(layer.feed_forwards[0]) for layer in spec.layers]
    assert kinds == [Mlp, Mlp, Mlp, Experts] + [Mlp, Experts] * 2
    assert spec.norm.centred
    assert (spec.rope.rotary_dim, spec.rope.sections) == (8, (4, 0, 0))
    assert spec.vision is None


def test_qwen3() -> None:
    spec = spec_of(config("qwen3"))
    assert {layer.mixers[0] for layer in spec.layers} == {Attention(4, 2, 32, gated=False)}
    assert {layer.feed_forwards[0] for layer in spec.layers} == {Mlp(128)}
    assert not spec.norm.centred
    assert (spec.rope.rotary_dim, spec.rope.sections) == (32, (16, 0, 0))
    assert spec.vision is None


def test_qwen3_moe_mixes_dense_layers_in() -> None:
    spec = spec_of(config_of(SPECS["qwen3 moe, every second layer dense"]))
    experts = Experts(Routing(6, 3), 32, shared=0)
    found = [layer.feed_forwards[0] for layer in spec.layers]
    assert found == [Mlp(128), Mlp(128), Mlp(128), experts, Mlp(128), experts]


def test_weights_of_experts_that_qwen3_moe_leaves_as_they_are_are_refused() -> None:
    """By default its class does, unlike those of its kin."""
    made = config("qwen3_moe")
    del made["norm_topk_prob"]
    with pytest.raises(CheckpointError, match="norm_topk_prob False is not supported, only True"):
        spec_of(made)


def test_lfm2() -> None:
    spec = spec_of(config_of(SPECS["lfm2, tied, biased, four taps"]))
    norms = ("q_layernorm", "k_layernorm")
    attention = Attention(2, 1, 32, gated=False, norms=norms, out="out_proj")
    conv = ShortConv(64, 4, bias=True)
    assert [layer.mixers[0] for layer in spec.layers] == [conv, conv, attention, conv, conv]
    assert {layer.feed_forwards[0] for layer in spec.layers} == {Mlp(128, "feed_forward", PARTS)}
    assert spec.tied_embeddings and (spec.rope.rotary_dim, spec.norm.eps) == (32, 1e-5)
    whole = config("lfm2", layer_types=None, full_attn_idxs=[1], block_auto_adjust_ff_dim=True)
    spec = spec_of(whole)
    kinds = [type(layer.mixers[0]) for layer in spec.layers]
    assert kinds == [ShortConv, Attention, ShortConv, ShortConv]
    assert spec.layers[0].feed_forwards[0] == Mlp(256, "feed_forward", PARTS), "85 in steps of 256"


def test_lfm2_moe() -> None:
    spec = spec_of(config_of(SPECS["lfm2 moe"]))
    experts = Experts(Routing(8, 3, (True, 1.0, 1e-6)), 32, 0, name="feed_forward", parts=PARTS)
    found = [layer.feed_forwards[0] for layer in spec.layers]
    assert found == [Mlp(128, "feed_forward", PARTS), experts, experts, experts]


def test_lfm2_vl() -> None:
    made = config("lfm2_vl")
    spec = spec_of(made)
    assert spec.vision == UnshuffledVisionSpec(
        depth=2,
        hidden_size=32,
        intermediate_size=64,
        heads=2,
        in_channels=3,
        patch_size=8,
        side=8,
        merge_size=2,
        out_hidden_size=64,
        projector_size=64,
        normed=True,
    )
    assert spec.tied_embeddings and spec.family.tile == "<|img_row_{}_col_{}|>"
    for name, value, complaint in (
        ("downsample_factor", 4, "downsample_factor 4 is not supported, only 2"),
        ("projector_bias", False, "projector_bias False is not supported, only True"),
        ("projector_hidden_act", "relu", "projector_hidden_act 'relu' is not supported"),
    ):
        with pytest.raises(CheckpointError, match=complaint):
            spec_of({**made, name: value})
    made["vision_config"]["num_patches"] = 63
    with pytest.raises(CheckpointError, match="num_patches 63 is no square"):
        spec_of(made)


def test_internvl() -> None:
    large = spec_of(config_of(SPECS["internvl, qwen2, tied, a large tower, resampled positions"]))
    assert large.vision == ClassVisionSpec(
        depth=2,
        hidden_size=32,
        intermediate_size=64,
        heads=4,
        in_channels=3,
        patch_size=8,
        side=6,
        merge_size=2,
        out_hidden_size=64,
        projector_size=64,
        biased=False,
        centred=False,
        qk_norms=True,
    )
    assert large.tied_embeddings and large.family.image_pad == "<IMG_CONTEXT>"
    assert {layer.mixers[0] for layer in large.layers} == {
        Attention(4, 2, 16, gated=False, bias=True, norms=None)
    }
    made = config("internvl")
    spec = spec_of(made)
    assert {layer.mixers[0] for layer in spec.layers} == {Attention(4, 2, 32, gated=False)}
    experts = made["text_config"] | {"model_type": "qwen3_moe", "norm_topk_prob": True}
    assert spec_of({**made, "text_config": experts}).routing == Routing(128, 8)
    for section, name, value, complaint in (
        (None, "downsample_ratio", 0.25, "downsample_ratio 0.25 is not supported, only 0.5"),
        (None, "vision_feature_layer", -2, "vision_feature_layer -2 is not supported, only -1"),
        (None, "projector_hidden_act", "relu", "projector_hidden_act 'relu' is not supported"),
        ("text_config", "model_type", "llama", "the text model_type 'llama' is not supported"),
        ("vision_config", "norm_type", "batch", "norm_type 'batch' is not supported"),
        ("vision_config", "patch_size", [8, 4], "patch_size must be the side of a square"),
        ("vision_config", "image_size", 60, "image_size 60 is no multiple of patch_size 8"),
        ("vision_config", "num_attention_heads", 5, "hidden_size 32 is no multiple of num_atten"),
    ):
        changed = config("internvl")
        (changed[section] if section else changed)[name] = value
        with pytest.raises(CheckpointError, match=complaint):
            spec_of(changed)


def test_granite() -> None:
    spec = spec_of(config("granitemoehybrid"))
    mamba = Mamba2(heads=4, head_dim=32, groups=1, state_dim=16, taps=4)
    attention = Attention(4, 2, 16, gated=False, norms=None, scale=0.3)
    names = ("input_linear", "input_linear", "output_linear")
    experts = Experts(Routing(8, 2), 32, 0, name="block_sparse_moe", router="router")
    assert [layer.mixers for layer in spec.layers] == [(mamba,), (attention,)] * 2
    behind = (Mlp(128, "shared_mlp", names), experts)
    assert {layer.feed_forwards for layer in spec.layers} == {behind}
    assert [branch.norm for branch in spec.layers[0].branches] == [*NORMS, None]
    assert spec.scales == Scales(1.5, 0.7, 3.0) and not spec.rope.turning
    assert spec.embedding_scale == 1.5 / 0.7 and spec.residual_eps == 1e-5 / 0.7**2
    dense = spec_of(config_of(SPECS["granite, rotated attention alone"]))
    assert dense.rope.turning and dense.routing is None and not dense.cache_layout().has_state
    assert {layer.feed_forwards for layer in dense.layers} == {behind[:1]}


def test_nemotron() -> None:
    spec = spec_of(config("nemotron_h"))
    limits = (1e-9, math.inf)
    mamba = Mamba2(4, 16, groups=2, state_dim=16, taps=4, limits=limits, name="mixer")
    attention = Attention(4, 2, 32, gated=False, name="mixer", norms=None)
    routing = Routing(8, 2, (True, 2.5, 1e-20))
    bias = "gate.e_score_correction_bias"
    experts = Experts(routing, 32, 0, name="mixer", parts=UNGATED, bias=bias)
    shared = Mlp(64, "mixer.shared_experts", UNGATED)
    parts = [(mamba,), (shared, experts), (attention,), (Mlp(128, "mixer", UNGATED),)]
    found = [tuple(branch.part for branch in layer.branches) for layer in spec.layers]
    assert found == parts and spec.last_norm == "norm_f" and not spec.rope.turning
    kinds = ["linear_attention", "moe", "attention", "mlp"]
    assert spec_of(config("nemotron_h", layers_block_type=kinds)).layers == spec.layers


def test_biases_of_attention_are_read() -> None:
    mixer = spec_of(config("qwen3", attention_bias=True)).layers[0].mixers[0]
    assert mixer == Attention(4, 2, 32, gated=False, bias=True, out_bias=True)


def test_qwen2() -> None:
    spec = spec_of(config("qwen2"))
    mixer = Attention(4, 2, 16, gated=False, bias=True, norms=None)
    assert {layer.mixers[0] for layer in spec.layers} == {mixer}
    assert {layer.feed_forwards[0] for layer in spec.layers} == {Mlp(128)}
    assert not spec.norm.centred and spec.vision is None
    assert (spec.rope.rotary_dim, spec.rope.sections) == (16, (8, 0, 0))


def test_vision_models_of_qwen2() -> None:
    for kind in ("qwen2_vl", "qwen2_5_vl"):
        spec, windowed = spec_of(config(kind)), kind == "qwen2_5_vl"
        assert spec.vision == RotaryVisionSpec(
            depth=3,
            hidden_size=32,
            intermediate_size=64,
            heads=2,
            in_channels=3,
            patch_size=8,
            temporal_patch_size=2,
            merge_size=2,
            out_hidden_size=64,
            rope_theta=10000.0,
            gated=windowed,
            window=3 if windowed else 0,
            whole=frozenset({2} if windowed else ()),
        )
        assert (spec.rope.sections, spec.rope.interleaved) == ((2, 3, 3), False)
        assert spec.rope.axes.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
        nested = config(kind)
        vision = nested.pop("vision_config")
        text = {name: nested.pop(name) for name in list(nested) if name != "model_type"}
        text |= {"model_type": f"{kind}_text"}
        assert replace(
            spec_of({**nested, "text_config": text, "vision_config": vision}), config={}
        ) == replace(spec, config={})


@pytest.mark.parametrize(
    ("fields", "vision", "message"),
    [
        ({"head_dim": 32}, {}, "head_dim 32 is not supported, only 16"),
        ({"use_sliding_window": True}, {}, "use_sliding_window True is not supported"),
        ({"rope_scaling": {"mrope_section": [2, 2, 2]}}, {}, r"mrope_section \[2, 2, 2\] does not"),
        ({}, {"window_size": 40}, "window_size 40 is no multiple of a token's 16 pixels"),
        ({}, {"fullatt_block_indexes": 2}, "fullatt_block_indexes must be a list of layers"),
        ({}, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only 'silu'"),
        ({}, {"in_chans": 4}, "in_chans 4 is not supported, only 3"),
    ],
)
def test_what_qwen2_5_vl_does_not_have_is_refused(
    fields: dict[str, Any], vision: dict[str, Any], message: str
) -> None:
    made = config("qwen2_5_vl", **fields)
    made["vision_config"] |= vision
    with pytest.raises(CheckpointError, match=message):
        spec_of(made)


def test_minicpmv() -> None:
    spec = spec_of(config_of(SPECS["minicpm"]))
    assert spec.vision == WindowVisionSpec(
        depth=3,
        hidden_size=32,
        intermediate_size=64,
        heads=2,
        in_channels=3,
        patch_size=8,
        side=8,
        merged_layer=1,
        merge_size=4,
        out_hidden_size=64,
    )
    assert (spec.media_features, spec.embedding_width) == (0, 64)
    assert (spec.family.positions, spec.rope.sections) == ("count", (4, 0, 0))
    assert {type(layer.mixers[0]) for layer in spec.layers} == {GatedDelta, Attention}
    fine = spec_of(config_of(SPECS["minicpm, 4x, tied"]))
    assert isinstance(fine.vision, WindowVisionSpec) and fine.tied_embeddings
    assert (fine.vision.merge_size, fine.vision.side) == (2, 7)
    canvas = spec_of(config_of(SPECS["minicpm on a canvas"]))
    assert (canvas.family.positions, canvas.rope.sections) == ("canvas", (2, 1, 1))


def test_names_that_transformers_saves_under_are_read() -> None:
    made = config("qwen3_vl_moe")
    made["text_config"]["num_local_experts"] = made["text_config"].pop("num_experts")
    assert spec_of(made).routing == Routing(8, 2)


def test_rotation_in_the_newer_form() -> None:
    made = config("qwen3_next")
    rotation = {"rope_theta": 77.0, "partial_rotary_factor": 0.5, "rope_type": "default"}
    for name in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
        del made[name]
    assert spec_of(made | {"rope_parameters": rotation}).rope.rotary_dim == 16


def test_untied_where_neither_section_says_so() -> None:
    made = config("qwen3_vl_moe")
    del made["tie_word_embeddings"], made["text_config"]["tie_word_embeddings"]
    assert not spec_of(made).tied_embeddings


LINEAR = {"rope_type": "linear", "factor": 4.0, "mrope_section": [6, 5, 5], "rope_theta": 1e4}
SPLIT = {"mrope_interleaved": False, "mrope_section": [6, 5, 5], "rope_theta": 1e4}
MAMBA = ("granitemoehybrid", "nemotron_h")
ALL = tuple(kind for kind in FAMILIES if kind not in MAMBA)
VL = ("qwen3_vl", "qwen3_vl_moe", "cosmos3_omni", "qwen3_omni_moe")
PLAIN = ("qwen3", "qwen3_moe", "internvl")
OLDER, OLDER_VL = ("qwen2",), ("qwen2_vl", "qwen2_5_vl")
CONVOLUTIONS = ("lfm2", "lfm2_moe", "lfm2_vl")
GATED = tuple(kind for kind in ALL if kind not in VL + PLAIN + OLDER + OLDER_VL + CONVOLUTIONS)
SPARSE = ("qwen3_vl_moe", "qwen3_omni_moe", "qwen3_next", "qwen3_moe")
REFUSED: list[tuple[tuple[str, ...], str, Any, str]] = [
    (ALL, "sliding_window", 4096, "sliding_window 4096 is not supported"),
    (ALL, "use_sliding_window", True, "use_sliding_window True is not supported"),
    (ALL, "layer_types", ["sliding_attention"] * 8, "layer_types 'sliding_attention'"),
    (ALL, "layer_types", ["mamba"] * 8, "layer_types 'mamba' is not supported"),
    (
        GATED + PLAIN + OLDER + CONVOLUTIONS,
        "rope_parameters",
        LINEAR,
        "rope_type 'linear' is not supported, only 'default'",
    ),
    (ALL, "rope_scaling", LINEAR, "rope_type 'linear' is not supported, only 'default'"),
    (VL + OLDER_VL, "rope_parameters", LINEAR, "whose rope_type 'linear' would be lost"),
    (ALL, "hidden_act", "gelu", "hidden_act 'gelu' is not supported, only 'silu'"),
    (ALL, "num_attention_heads", 3, "num_attention_heads 3 is no multiple of its"),
    (VL, "rope_scaling", SPLIT, "mrope_interleaved False is not supported, only True"),
    (
        VL + PLAIN + OLDER,
        "attn_output_gate",
        True,
        "attn_output_gate True is not supported, only False",
    ),
    (PLAIN, "use_qk_norm", False, "use_qk_norm False is not supported, only True"),
    (PLAIN, "qkv_bias", True, "qkv_bias True is not supported, only False"),
    (
        VL + PLAIN + OLDER + OLDER_VL,
        "partial_rotary_factor",
        0.5,
        "partial_rotary_factor 0.5 is not supported, only 1",
    ),
    (SPARSE, "norm_topk_prob", False, "norm_topk_prob False is not supported, only True"),
    (SPARSE, "mlp_only_layers", 3, "'mlp_only_layers' with value 3"),
    (SPARSE, "decoder_sparse_step", 0, "decoder_sparse_step in config.json must be a positive"),
    (("qwen3_moe",), "shared_expert_intermediate_size", 64, "shared_expert_intermediate_size 64"),
    (("qwen3_next",), "attn_output_gate", False, "attn_output_gate False is not supported"),
    (CONVOLUTIONS, "conv_L_cache", 1, "conv_L_cache 1 is not supported"),
    (("lfm2_moe",), "norm_topk_prob", False, "norm_topk_prob False is not supported, only True"),
    (("lfm2_moe",), "num_dense_layers", -1, "num_dense_layers -1 in config.json is no number"),
    (MAMBA, "sliding_window", 4096, "sliding_window 4096 is not supported"),
    (MAMBA, "layer_types", ["sliding_attention"] * 4, "layer_types 'sliding_attention'"),
    (MAMBA, "num_attention_heads", 3, "num_attention_heads 3 is no multiple of its"),
    (MAMBA, "num_experts_per_tok", 9, "num_experts_per_tok 9 exceeds 8 experts"),
    (("granitemoehybrid",), "layer_types", ["mamba"] * 3, "layer_types names 3 layers of 4"),
    (("granitemoehybrid",), "layer_types", ["moe"] * 4, "layer_types 'moe' is not supported"),
    (("granitemoehybrid",), "mamba_n_groups", 2, "mamba_n_groups 2 is not supported, only 1"),
    (("granitemoehybrid",), "time_step_limit", [1], r"time_step_limit [1] is not supported"),
    *(
        (("granitemoehybrid",), "time_step_limit", limits, "time_step_limit [")
        for limits in ([0.5, 0.1], [math.nan, 1], [0, math.nan], [-1, 5], [math.inf, math.inf])
    ),
    *(
        (("nemotron_h",), "time_step_min", least, "time_step_min")
        for least in (-0.1, math.nan, math.inf)
    ),
    *(
        (("granitemoehybrid",), "residual_multiplier", factor, "residual_multiplier in config.json")
        for factor in (1e-200, 1e308)
    ),
    (("granitemoehybrid",), "residual_multiplier", 0, "residual_multiplier in config.json must be"),
    (("granitemoehybrid",), "position_embedding_type", "alibi", "position_embedding_type 'alibi'"),
    (("nemotron_h",), "hybrid_override_pattern", "ME*X", "pattern 'X' is not supported"),
    (("nemotron_h",), "hybrid_override_pattern", "", "hybrid_override_pattern names 0 layers"),
    (("nemotron_h",), "layers_block_type", ["ssm"], "layers_block_type 'ssm' is not supported"),
    (("nemotron_h",), "hybrid_override_pattern", "E-", "no layer has Mamba2 or attention"),
    (("nemotron_h",), "hybrid_override_pattern", 4, "hybrid_override_pattern in config.json must"),
    (("nemotron_h",), "mlp_hidden_act", "silu", "mlp_hidden_act 'silu' is not supported"),
    (("nemotron_h",), "mamba_dt_min", 0.01, "mamba_dt_min 0.01 is not supported"),
    (("nemotron_h",), "n_group", 2, "n_group 2 is not supported, only 1"),
    (("nemotron_h",), "moe_latent_size", 64, "moe_latent_size 64 is not supported"),
    (("nemotron_h",), "norm_topk_prob", False, "norm_topk_prob False is not supported"),
    (("nemotron_h",), "mamba_num_heads", 3, "mamba_num_heads 3 is no multiple of its 2"),
    (GATED, "output_gate_type", "sigmoid", "output_gate_type 'sigmoid' is not supported"),
]


@pytest.mark.parametrize(
    ("kind", "name", "value", "complaint"),
    [(kind, *rest) for kinds, *rest in REFUSED for kind in kinds],
)
def test_what_nobody_supports_is_named(kind: str, name: str, value: Any, complaint: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        spec_of(config(kind, **{name: value}))
    assert complaint in caught.value.message and "\n" not in caught.value.message


def test_a_whole_number_beyond_any_float_is_refused() -> None:
    changed = config("granitemoehybrid", residual_multiplier=10**400)
    with pytest.raises(CheckpointError, match="residual_multiplier .* is too large a number"):
        spec_of(changed)


def test_a_window_that_is_switched_off_is_none() -> None:
    assert spec_of(config("qwen3_vl", use_sliding_window=False, sliding_window=4096))


@pytest.mark.parametrize(
    ("section", "changes", "complaint"),
    [
        ("vision_config", {"deepstack_visual_indexes": [2, 1]}, r"visual_indexes \[2, 1\] are not"),
        ("vision_config", {"deepstack_visual_indexes": [1, 3]}, r"\[1, 3\] are not .* below 3"),
        ("vision_config", {"deepstack_visual_indexes": None}, "deepstack_visual_indexes.* None"),
        ("vision_config", {"model_type": "siglip"}, "model_type 'siglip' is not supported"),
        ("vision_config", {"num_heads": 5}, "hidden_size 32 is no multiple"),
        ("vision_config", {"out_hidden_size": 32}, "out_hidden_size 32 .* hidden_size 64"),
        ("text_config", {"model_type": "llama"}, "model_type 'llama' is not supported"),
        ("text_config", {"num_hidden_layers": 2}, "too many for num_hidden_layers 2"),
    ],
)
def test_sections_that_do_not_fit_are_named(
    section: str, changes: dict[str, Any], complaint: str
) -> None:
    made = config("qwen3_vl")
    made[section] |= changes
    with pytest.raises(CheckpointError, match=complaint):
        spec_of(made)


MINICPM: list[tuple[str | None, str, Any, str]] = [
    (None, "downsample_mode", "8x", "downsample_mode '8x' is not supported, only '16x' and '4x'"),
    (None, "merger_times", 2, "merger_times 2 is not supported, only 1"),
    (None, "merge_kernel_size", [3, 3], "merge_kernel_size [3, 3] is not supported, only [2, 2]"),
    (None, "drop_vision_last_layer", True, "drop_vision_last_layer True is not supported"),
    (None, "insert_layer_id", 3, "insert_layer_id 3 is none of the 3 vision layers"),
    (None, "insert_layer_id", "6", "insert_layer_id '6' is none of the 3 vision layers"),
    (None, "insert_layer_id", True, "insert_layer_id True is none of the 3 vision layers"),
    (None, "downsample_mode", ["4x"], "downsample_mode ['4x'] is not supported"),
    (None, "insert_layer_id", -1, "insert_layer_id -1 is none of the 3 vision layers"),
    ("vision_config", "window_kernel_size", [4, 4], "window_kernel_size [4, 4] is not supported"),
    ("vision_config", "hidden_act", "gelu", "hidden_act 'gelu' is not supported"),
    ("vision_config", "layer_norm_eps", 1e-5, "layer_norm_eps 1e-05 is not supported, only 1e-06"),
    ("vision_config", "model_type", "siglip", "model_type 'siglip' is not supported"),
    ("vision_config", "num_attention_heads", 5, "hidden_size 32 is no multiple of num_attention"),
    ("vision_config", "image_size", 4, "image_size 4 is less than a patch"),
    (
        "vision_config",
        "num_hidden_layers",
        0,
        "num_hidden_layers in config.json must be a positive",
    ),
    ("text_config", "model_type", "llama", "model_type 'llama' is not supported, only 'qwen3_5_t"),
    ("text_config", "attn_output_gate", False, "attn_output_gate False is not supported"),
]


@pytest.mark.parametrize("kind", ["minicpmv4_6", "minicpmv4_7"])
@pytest.mark.parametrize(("section", "name", "value", "complaint"), MINICPM)
def test_what_nobody_supports_of_minicpmv_is_named(
    kind: str, section: str | None, name: str, value: Any, complaint: str
) -> None:
    made = config_of(next(iter(SHAPES[kind].values())))
    (made[section] if section else made)[name] = value
    with pytest.raises(CheckpointError) as caught:
        spec_of(made)
    assert complaint in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3' is not supported"),
        ({"sliding_window": 128}, "sliding_window 128 is not supported"),
    ],
)
def test_no_weight_is_read_before(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    made = config("qwen3_next") | change
    (tmp_path / "config.json").write_text(json.dumps(made))
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=complaint):
        Pipeline(tmp_path, EngineConfig())


@pytest.mark.parametrize(
    ("kind", "near"),
    [
        ("qwen2_5_omni", "has audio; take Qwen3-VL"),
        ("qwen2_moe", "no norms of queries and keys"),
        ("qwen4_exp", "Qwen3.8-Flash-Next has sparse attention"),
        ("falcon_h1", "Falcon-h1 has Mamba2 beside other parts; take Granite 4"),
        ("jamba", "Jamba has the first Mamba's recurrence; take Granite 4"),
        ("nemotron_h_omni", "Nemotron-h-omni has a tower of RADIO's kind and sound"),
        ("lfm3_vl", "short convolutions"),
        ("kimi_linear", "KDA"),
        ("kimi_k25", "MLA"),
        ("olmo_hybrid", "negative eigenvalues"),
        ("gemma3", "sliding windows"),
        ("internvl_chat", "the layout of its own code"),
        ("qwen3_asr", "has audio"),
    ],
)
def test_what_is_missing_for_a_near_model_is_said(kind: str, near: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        spec_of({"model_type": kind})
    message = caught.value.message
    assert near in message and "\n" not in message
    for name in ("Qwen3.5 ", "Qwen3.6 ", "Qwen3.8 ", "Qwen3-VL ", "Qwen3-Next ", "MiniCPM-V "):
        assert name in message


def test_weights_come_in_the_type_that_the_file_names() -> None:
    assert spec_of(config("qwen3_vl") | {"dtype": "bfloat16"}).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("fields", "near"),
    [
        ({"mamba_d_state": 128}, "Newer-vl has the first Mamba's recurrence"),
        ({"mamba_n_heads": 8, "mamba_d_state": 128}, "Newer-vl has Mamba2 beside other parts"),
        ({"text_config": {"conv_L_cache": 3}}, "short convolutions"),
        ({"text_config": {"kv_lora_rank": 512}, "vision_config": {"depth": 2}}, "MLA"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
        ({"audio_config": {"a": 1}, "vision_config": {"depth": 2}}, "has audio"),
        ({"vision_config": {"depth": 2}}, "another vision tower"),
        ({"mamba_d_state": None, "layer_types": 4}, "model_type 'newer_vl' is not supported; "),
    ],
)
def test_the_kind_of_an_unknown_type_is_told_by_its_fields(
    fields: dict[str, Any], near: str
) -> None:
    with pytest.raises(CheckpointError, match=near):
        spec_of({"model_type": "newer_vl", **fields})


@pytest.mark.parametrize("kind", ["vl", "vl moe", "dense", "moe, three value heads, four kv heads"])
def test_a_language_model_alone_is_that_of_the_whole(kind: str) -> None:
    """Trainers save it so: by its own type, or by the whole's with the fields of the section."""
    whole = config_of(SPECS[kind])
    expected, text = spec_of(whole), dict(whole["text_config"])
    text["tie_word_embeddings"] = whole["tie_word_embeddings"]
    for name in (text["model_type"], whole["model_type"]):
        found = spec_of({**text, "model_type": name})
        assert found.vision is None
        assert (found.layers, found.rope, found.norm) == (
            expected.layers,
            expected.rope,
            expected.norm,
        )
        assert (found.family, found.tied_embeddings) == (expected.family, expected.tied_embeddings)


def test_the_rotation_called_mrope_is_the_plain_one() -> None:
    for kind in ("qwen3_5", "qwen3_vl", "qwen3_vl_moe"):
        made = config(kind)
        expected = spec_of(made)
        text = made["text_config"]
        place = "rope_scaling" if "rope_scaling" in text else "rope_parameters"
        for name in ("rope_type", "type"):
            named = {k: v for k, v in text[place].items() if k != "rope_type"} | {name: "mrope"}
            assert spec_of({**made, "text_config": {**text, place: named}}) == expected
