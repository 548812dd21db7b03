"""Reading config.json: every field, every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_spec import CheckpointSpec, full_config, text_config

from vlm_serve.errors import CheckpointError
from vlm_serve.models.config import ModelConfig

TOKEN_IDS = {
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}


def dense(**changes: Any) -> dict[str, Any]:
    spec = CheckpointSpec()
    return full_config(spec, text_config(spec) | changes) | TOKEN_IDS


def moe(**changes: Any) -> dict[str, Any]:
    spec = CheckpointSpec(num_experts=4, vision_depth=0)
    return text_config(spec) | changes


def test_dense_with_vision() -> None:
    config = ModelConfig.from_dict(dense())
    text, vision = config.text, config.vision
    assert text.layer_types == ("linear_attention",) * 3 + ("full_attention",)
    assert (text.num_layers, text.attention_layers, text.gdn_layers) == (4, 1, 3)
    assert (text.moe, text.moe_layers, text.intermediate_size) == (None, 0, 128)
    assert text.conv_dim == 2 * 2 * 16 + 4 * 16
    assert text.value_dim == 64
    assert text.rope.rotary_dim == 8 and sum(text.rope.sections) == 4
    assert vision is not None and vision.patch_dim == 3 * 2 * 8 * 8
    assert (config.image_token_id, config.video_token_id) == (5, 6)
    assert config.dtype is torch.float32


def test_moe_text_only() -> None:
    config = ModelConfig.from_dict(moe())
    assert config.vision is None and config.image_token_id is None
    assert config.text.moe is not None
    assert (config.text.moe.num_experts, config.text.moe.top_k) == (4, 2)
    assert config.text.moe_layers == config.text.num_layers == 4


def test_defaults_of_transformers() -> None:
    config = dense(layer_types=None, full_attention_interval=2, rope_parameters=None)
    del config["dtype"], config["text_config"]["dtype"]
    read = ModelConfig.from_dict(config)
    assert read.text.layer_types == ("linear_attention", "full_attention") * 2
    assert read.text.rope.theta == 10000.0
    assert read.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("outer", "inner", "tied"), [(True, False, True), (False, True, False), (None, True, True)]
)
def test_the_outer_switch_ties_embeddings(outer: bool | None, inner: bool, tied: bool) -> None:
    config = dense(tie_word_embeddings=inner)
    del config["tie_word_embeddings"]
    if outer is not None:
        config["tie_word_embeddings"] = outer
    assert ModelConfig.from_dict(config).text.tied_embeddings is tied


def test_end_tokens_come_from_the_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dense(eos_token_id=3)))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 3]}')
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (9, 3)
    assert ModelConfig.from_dir(tmp_path).generation == {"eos_token_id": [9, 3]}
    (tmp_path / "generation_config.json").write_text("{}")
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"model_type": "llama"}, "'llama' is not supported; supported are qwen3_5"),
        ({}, "None is not supported"),
        (dense() | {"quantization_config": {"bits": 4}}, "quantised"),
        (dense() | {"text_config": None}, "lacks text_config"),
        (dense() | {"text_config": 3}, "must be an object"),
        (dense() | {"image_token_id": None}, "lacks image_token_id"),
        (dense(layer_types=["linear_attention"] * 3), "names 3 layers of 4"),
        (dense(layer_types=["sliding_attention"] * 4), "'sliding_attention' is not supported"),
        (dense(hidden_size=None), "lacks hidden_size"),
        (dense(hidden_size=True), "hidden_size in config.json must be a positive integer"),
        (dense(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
        (dense(attn_output_gate=False), "attn_output_gate"),
        (dense(linear_num_value_heads=3), "linear_num_value_heads 3"),
        (dense(num_key_value_heads=3), "num_attention_heads 4"),
        (dense(rope_parameters={"rope_type": "yarn"}), "'yarn' is not supported"),
        (dense(rope_parameters={"mrope_section": [1, 2]}), "mrope_section"),
        (dense() | {"dtype": "float8"}, "'float8' is not supported"),
        (moe(num_experts_per_tok=5), "exceeds 4 experts"),
    ],
)
def test_unsupported_configs_are_named(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        ModelConfig.from_dict(config)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"deepstack_visual_indexes": [1]}, "deepstack"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_type"),
        ({"num_heads": 3}, "multiple of 4"),
    ],
)
def test_unsupported_vision_towers_are_named(changes: dict[str, Any], complaint: str) -> None:
    config = dense()
    config["vision_config"] |= changes
    with pytest.raises(CheckpointError, match=complaint):
        ModelConfig.from_dict(config)


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
        ModelConfig.from_dir(tmp_path)
    assert str(tmp_path) not in str(caught.value)
