"""Reading config.json: every field, every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_config import full_config, text_config
from checkpoint_spec import CheckpointSpec

from vlm_serve.errors import CheckpointError
from vlm_serve.models.parts.attention import Attention
from vlm_serve.models.parts.base import Routing
from vlm_serve.models.parts.feed_forward import Mlp
from vlm_serve.models.parts.gated_delta import GatedDelta
from vlm_serve.models.registry import read_spec, spec_of
from vlm_serve.models.vision import VisionSpec

TOKEN_IDS = {
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}


def dense(**changes: Any) -> dict[str, Any]:
    spec = CheckpointSpec()
    return full_config(spec, text_config(spec) | changes) | TOKEN_IDS


ROPE = dense()["text_config"]["rope_parameters"]


def moe(**changes: Any) -> dict[str, Any]:
    spec = CheckpointSpec(num_experts=4, vision_depth=0)
    return text_config(spec) | changes


def test_dense_with_vision() -> None:
    spec = spec_of(dense())
    delta, attention = spec.layers[0].mixers[0], spec.layers[3].mixers[0]
    assert isinstance(delta, GatedDelta) and isinstance(attention, Attention)
    assert [layer.mixers[0] for layer in spec.layers] == [delta] * 3 + [attention]
    assert {layer.feed_forwards[0] for layer in spec.layers} == {Mlp(128)}
    assert (spec.routing, spec.expert_layers) == (None, 0)
    assert (delta.channels, delta.values) == (2 * 2 * 16 + 4 * 16, 64)
    assert (attention.gated, attention.bias) == (True, False)
    assert spec.rope.rotary_dim == 8 and sum(spec.rope.sections) == 4
    assert isinstance(spec.vision, VisionSpec) and spec.vision.patch_dim == 3 * 2 * 8 * 8
    assert spec.dtype is torch.float32


def test_moe_text_only() -> None:
    spec = spec_of(moe())
    assert spec.vision is None
    assert spec.routing == Routing(num_experts=4, top_k=2)
    assert spec.expert_layers == len(spec.layers) == 4


def test_defaults_and_renames_of_transformers() -> None:
    config = dense(layer_types=None, full_attention_interval=2, attention_bias=None)
    text = config["text_config"]
    del config["dtype"], text["dtype"], text["attention_bias"], text["layer_types"]
    text["rope_scaling"] = text.pop("rope_parameters")
    spec = spec_of(config)
    assert [type(layer.mixers[0]) for layer in spec.layers] == [GatedDelta, Attention] * 2
    assert spec.rope.theta == 10000.0
    assert spec.dtype is torch.bfloat16


def test_without_state_layers_their_sizes_are_not_asked_for() -> None:
    config = dense(layer_types=["full_attention"] * 4)
    for name in [name for name in config["text_config"] if name.startswith("linear_")]:
        del config["text_config"][name]
    layout = spec_of(config).cache_layout()
    assert not layout.has_state
    assert [(pool.kind, layers) for pool, layers in layout.pools] == [("kv", 4), ("kv_scales", 4)]


def test_transformers_itself_reads_the_file() -> None:
    """What our own checks let pass and its class does not is refused with its words."""
    with pytest.raises(CheckpointError, match="attention_bias"):
        spec_of(dense(attention_bias="no"))


@pytest.mark.parametrize(
    ("outer", "inner", "tied"), [(True, False, True), (False, True, False), (None, True, True)]
)
def test_the_outer_switch_ties_embeddings(outer: bool | None, inner: bool, tied: bool) -> None:
    config = dense(tie_word_embeddings=inner)
    del config["tie_word_embeddings"]
    if outer is not None:
        config["tie_word_embeddings"] = outer
    assert spec_of(config).tied_embeddings is tied


def test_defaults_of_sampling_come_with_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dense()))
    assert read_spec(tmp_path).generation == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 3]}')
    assert read_spec(tmp_path).generation == {"eos_token_id": [9, 3]}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (
            {"model_type": "llama"},
            r"'llama' is not supported: Llama has .*; supported are Qwen3\.5 0\.8B",
        ),
        ({}, "None is not supported"),
        (
            dense() | {"quantization_config": {"bits": 4}},
            "quant_method None in quantization_config",
        ),
        (dense() | {"text_config": None}, "lacks text_config"),
        (dense() | {"text_config": 3}, "must be an object"),
        (dense(layer_types=["linear_attention"] * 3), "layer_types"),
        (dense(layer_types=["sliding_attention"] * 4), "'sliding_attention' is not supported"),
        (dense(hidden_size=None), "hidden_size"),
        (dense(hidden_size=True), "hidden_size"),
        (dense(hidden_size=0), "hidden_size in config.json must be a positive integer, not 0"),
        (dense(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
        (dense(attn_output_gate=False), "attn_output_gate"),
        (dense(output_gate_type="sigmoid"), "output_gate_type 'sigmoid' is not supported"),
        (dense(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=True), "mtp_use_dedicated"),
        (dense(linear_num_value_heads=3), "linear_num_value_heads 3"),
        (dense(num_key_value_heads=3), "num_attention_heads 4"),
        (
            dense(rope_parameters=ROPE | {"rope_type": "linear", "factor": 2.0}),
            "'linear' is not supported, only 'default' and 'yarn'",
        ),
        *(
            (dense(rope_parameters=ROPE | {"mrope_section": sizes}), "mrope_section")
            for sizes in ([1, 2], 3, 1.5, True, ["a", 1, 2], [-1, 2, 2])
        ),
        (dense(rope_parameters=ROPE | {"mrope_interleaved": False}), "mrope_interleaved"),
        (dense(rms_norm_eps="small"), "rms_norm_eps"),
        (dense(rms_norm_eps=-1e-6), "rms_norm_eps in config.json must be positive"),
        (dense(rms_norm_eps=float("nan")), "rms_norm_eps in config.json must be positive"),
        *(
            (dense(rope_parameters=ROPE | {"rope_theta": theta}), "rope_theta .* be positive")
            for theta in (0, -1.0, float("nan"), float("inf"))
        ),
        (dense(rope_parameters=ROPE | {"rope_theta": None}), "rope_theta .* a number, not None"),
        (dense(rope_parameters=ROPE | {"partial_rotary_factor": 0}), "partial_rotary_factor"),
        (dense(rope_parameters=ROPE | {"partial_rotary_factor": 2.0}), "mrope_section"),
        (dense() | {"dtype": "float8"}, "'float8' is not supported"),
        (dense() | {"dtype": ["float32"]}, "dtype .'float32'. is not supported"),
        ({"model_type": ["qwen3_5"]}, "model_type .'qwen3_5'. is not supported"),
        (dense(layer_types=7), "layer_types in config.json must be a list of names, not 7"),
        (dense(layer_types=["full_attention", 1]), "layer_types in config.json must be a list"),
        (moe(num_experts_per_tok=5), "exceeds 4 experts"),
    ],
)
def test_unsupported_configs_are_named(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        spec_of(config)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"deepstack_visual_indexes": [1]}, r"deepstack_visual_indexes \[1\]"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type"),
        ({"num_heads": 3}, "multiple of 4"),
        ({"patch_size": 0}, "patch_size in config.json must be a positive integer"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 0}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": "x"}}, "rope_theta .* 'x'"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": None}}, "rope_theta .* None"),
    ],
)
def test_unsupported_vision_towers_are_named(changes: dict[str, Any], complaint: str) -> None:
    config = dense()
    config["vision_config"] |= changes
    with pytest.raises(CheckpointError, match=complaint):
        spec_of(config)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "has no config.json"), ("{", "cannot be read as JSON"), ("[]", "JSON object")],
)
def test_broken_files_are_named_without_their_path(
    tmp_path: Path, content: str | None, complaint: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        read_spec(tmp_path)
    assert str(tmp_path) not in str(caught.value)


def test_an_automatic_dtype_is_the_usual_one() -> None:
    for name in ("dtype", "torch_dtype"):
        config = dense()
        del config["dtype"], config["text_config"]["dtype"]
        assert spec_of(config | {name: "auto"}) == spec_of(config)
