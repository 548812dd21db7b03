"""Changes to config.json by options: they reach the model and its identity, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from checkpoint_config import full_config, text_config
from families import FAMILIES, SPECS
from make_checkpoint import make_checkpoint
from model_driver import Driver, text_sequence

from vlm_serve.errors import ConfigError
from vlm_serve.models import load_model
from vlm_serve.models.config import Changes, read_json
from vlm_serve.models.registry import read_spec, spec_of

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
CARD = YARN | {
    "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
}
"""As the cards of Qwen3.5 tell it to SGLang and vLLM, for small heads."""
TOKENS = [(7 * index * index + 3) % 400 for index in range(100)]


def config(name: str) -> dict[str, Any]:
    spec = SPECS[name]
    text = text_config(spec)
    return full_config(spec, text) if spec.vision_depth else text


@pytest.mark.parametrize("kind", sorted(FAMILIES.keys() - {"granitemoehybrid", "nemotron_h"}))
def test_a_rotation_by_option_is_that_of_a_file_with_the_same_fields(
    tmp_path: Path, kind: str
) -> None:
    path = make_checkpoint(tmp_path, next(iter(FAMILIES[kind].values())))
    raw = read_json(path / "config.json")
    asked = read_spec(path, Changes(rotation=YARN))
    whole = raw.get("thinker_config", raw)
    text = whole.get("text_config", whole)
    name = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
    text[name] = (text.get(name) or {}) | YARN
    assert asked == spec_of(raw)
    assert asked.rope.yarn is not None and asked.rope.yarn.factor == 4.0
    assert asked.rope != read_spec(path).rope


@pytest.mark.parametrize("name", ["dense", "vl", "next", "qwen3"])
def test_logits_equal_those_of_transformers_with_the_fields_in_the_file(
    tmp_path: Path, name: str
) -> None:
    path = make_checkpoint(tmp_path / "plain", SPECS[name])
    other = make_checkpoint(tmp_path / "written", SPECS[name])
    changes = Changes(rotation=YARN)
    written = changes.apply(read_json(other / "config.json"))
    (other / "config.json").write_text(json.dumps(written))
    expected = oracle.logits(other, {"input_ids": torch.tensor([TOKENS])})
    model = load_model(path, torch.float32, "cpu", changes=changes)
    got = Driver(model).prefill(text_sequence(TOKENS))
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)


def test_identity_follows_the_changed_config(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, SPECS["qwen3"])
    before = (path / "config.json").read_text()
    plain, asked = (
        load_model(path, torch.float32, "cpu", changes=each).fingerprint
        for each in (Changes(), Changes(rotation=YARN))
    )
    (path / "config.json").write_text(json.dumps(json.loads(before) | {"rope_scaling": YARN}))
    written = load_model(path, torch.float32, "cpu").fingerprint
    assert plain != asked == written


def test_the_way_of_the_cards_to_a_longer_context() -> None:
    raw = config("dense")
    asked = Changes({"text_config": {"rope_parameters": CARD}})
    spec = spec_of(raw, asked)
    assert spec.rope.theta == 1e7
    assert spec.rope.yarn is not None
    assert spec.rope.yarn.context == 128
    assert spec.config["text_config"]["rope_parameters"] == raw["text_config"][
        "rope_parameters"
    ] | (CARD)
    assert raw == config("dense")


def test_fields_that_are_not_named_stay() -> None:
    spec = spec_of(config("text"), Changes({"rope_parameters": {"rope_theta": 77.0}}))
    assert spec.rope.theta == 77.0
    assert spec.rope.sections == spec_of(config("text")).rope.sections
    assert spec_of(config("text"), Changes({"max_position_embeddings": 99})) != spec_of(
        config("text")
    )


@pytest.mark.parametrize(
    ("name", "fields", "complaint"),
    [
        ("dense", {"rope_parameters": YARN}, "hf_overrides: rope_parameters.rope_type has no eff"),
        ("dense", {"rope_parameters": YARN}, "text_config.rope_parameters.rope_type would"),
        ("dense", {"text_config": {"rope_theat": 1}}, "text_config.rope_theat has no effect"),
        ("qwen3", {"architectures": ["Qwen3Model"]}, "architectures has no effect"),
        ("qwen3", {"text_config": {"hidden_size": 64}}, "text_config.hidden_size has no effect"),
    ],
)
def test_a_change_without_effect_is_refused(
    name: str, fields: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        spec_of(config(name), Changes(fields))
    assert caught.value.param == "hf_overrides"


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"typ": "yarn"}, "rope_scaling: typ has no effect"),
        ({"factor": 2.0}, "rope_scaling: factor has no effect"),
        (YARN | {"short_factor": [1]}, "rope_scaling: short_factor has no effect"),
    ],
)
def test_a_rotation_without_effect_is_refused(fields: dict[str, Any], complaint: str) -> None:
    for name in ("dense", "qwen3"):
        with pytest.raises(ConfigError, match=complaint) as caught:
            spec_of(config(name), Changes(rotation=fields))
        assert caught.value.param == "rope_scaling"


def test_ids_of_tokens_and_whole_objects_may_be_changed() -> None:
    fields = {"image_token_id": 7, "text_config": {"eos_token_id": 3}}
    assert spec_of(config("vl"), Changes(fields)).config["image_token_id"] == 7
    scheme = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    spec = spec_of(config("qwen3"), Changes({"quantization_config": scheme}))
    assert spec.quantization is not None


def test_a_field_of_the_tower_may_be_changed() -> None:
    spec = spec_of(config("vl"), Changes({"vision_config": {"num_heads": 4}}))
    assert spec.vision is not None and spec != spec_of(config("vl"))
