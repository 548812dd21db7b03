"""YaRN, as model cards tell to write it, computes what transformers computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from checkpoint_config import full_config, text_config
from checkpoint_spec import CheckpointSpec
from families import FAMILIES, SPECS
from make_checkpoint import make_checkpoint
from model_driver import Driver, text_sequence

from vlm_serve.errors import CheckpointError
from vlm_serve.models import load_model
from vlm_serve.models.registry import spec_of
from vlm_serve.models.spec import Rope
from vlm_serve.preprocess.text.family import answering_part

TOLERANCE = 2e-4
ADDED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def dense(**changes: Any) -> dict[str, Any]:
    spec = CheckpointSpec()
    return full_config(spec, text_config(spec) | changes)


def of_transformers(theta: float, dims: int, fields: dict[str, Any]) -> tuple[Any, float]:
    oracle.prepare_torchvision()
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=2 * dims,
        num_attention_heads=2,
        head_dim=dims,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": theta, **fields},
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[fields["rope_type"]](config)
    return frequencies, scale


def spec_with(**fields: Any) -> dict[str, Any]:
    rotation = dense()["text_config"]["rope_parameters"] | fields
    return dense(rope_parameters=rotation, max_position_embeddings=4096)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"original_max_position_embeddings": 1024},
        {"factor": 1.0},
        {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
        {"mscale": 1.0},
        {"attention_factor": 1.5},
        {"beta_fast": 16, "beta_slow": 2.5},
        {"truncate": False},
    ],
)
@pytest.mark.parametrize(("theta", "share"), [(1e4, 0.25), (1e7, 0.25), (5e5, 0.5)])
def test_numbers_equal_those_of_transformers(
    more: dict[str, Any], theta: float, share: float
) -> None:
    fields = {"rope_type": "yarn", "factor": 4.0, **more}
    head = 256
    half = int(head * share) // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    made = spec_with(
        **fields, rope_theta=theta, partial_rotary_factor=share, mrope_section=sections
    )
    made["text_config"]["head_dim"] = head
    rope = spec_of(made).rope
    expected, scale = of_transformers(theta, 2 * half, dict(fields))
    assert torch.equal(rope.frequencies(), expected)
    assert rope.scale == scale


def test_without_yarn_nothing_changes() -> None:
    rope = Rope(1e4, 16, (8, 0, 0))
    assert rope.scale == 1.0
    assert torch.equal(
        rope.frequencies(), 1.0 / (1e4 ** (torch.arange(0, 16, 2, dtype=torch.float) / 16))
    )


def changed(path: Path, place: str) -> Path:
    """Add YaRN to a checkpoint: in the dict that it has, or as `rope_scaling` beside it."""
    file = path / "config.json"
    raw = json.loads(file.read_text())
    text = raw.get("text_config", raw)
    saved = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if place == "inside":
        name = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
        text[name] = saved | ADDED
    else:
        text["rope_parameters"] = saved
        text["rope_scaling"] = saved | ADDED
    file.write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize("place", ["inside", "beside"])
@pytest.mark.parametrize("name", ["text", "vl moe", "next", "minicpm"])
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str, place: str) -> None:
    plain = make_checkpoint(tmp_path / "plain", SPECS[name])
    path = changed(make_checkpoint(tmp_path / "yarn", SPECS[name]), place)
    tokens = [(7 * index * index + 3) % 400 for index in range(100)]
    inputs = {"input_ids": torch.tensor([tokens])}
    expected = oracle.logits(path, inputs)
    assert not torch.allclose(expected, oracle.logits(plain, inputs), atol=10 * TOLERANCE)
    for compiled in (False, True):
        model = load_model(path, torch.float32, "cpu", compiled=compiled)
        got = Driver(model).prefill(text_sequence(tokens))
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def rotated(kind: str) -> dict[str, Any]:
    """The config.json of a family's first shape with rotation."""
    for spec in FAMILIES[kind].values():
        text = text_config(spec)
        raw = dict(answering_part(full_config(spec, text) if spec.vision_depth else text))
        if spec_of(raw).rope.turning:
            return raw
    pytest.skip("no attention is rotated: nothing to scale")


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_longer_context_counts(kind: str) -> None:
    raw = rotated(kind)
    text = raw.get("text_config", raw)
    name = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
    rotation = text.get(name) or {}
    given = text["max_position_embeddings"]
    for original, context in ((None, 4 * given), (given, 4 * given), (64, given)):
        given_too = {"original_max_position_embeddings": original} if original else {}
        text[name] = rotation | {"rope_type": "yarn", "factor": 4.0} | given_too
        assert spec_of(raw).max_position_embeddings == context


def test_what_rope_scaling_would_replace_is_named() -> None:
    """transformers would take its own default without a word."""
    saved = dense()["text_config"]["rope_parameters"] | {"rope_theta": 77.0}
    with pytest.raises(CheckpointError, match=r"rope_theta 77.0 would be lost: write it into"):
        spec_of(dense(rope_parameters=saved, rope_scaling=ADDED))


def test_a_kind_that_rope_scaling_would_replace_is_named() -> None:
    saved = dense()["text_config"]["rope_parameters"]
    with pytest.raises(CheckpointError, match=r"whose rope_type 'yarn' would be lost"):
        spec_of(dense(rope_parameters=saved | ADDED, rope_scaling=saved))
    assert spec_of(dense(rope_parameters=saved | ADDED, rope_scaling=saved | ADDED)).rope.yarn


def test_a_dynamic_rotation_is_plain_within_the_context() -> None:
    fields = {"rope_type": "dynamic", "factor": 2.0}
    spec = spec_of(text_config(SPECS["qwen3"]) | {"rope_scaling": {**fields, "type": "dynamic"}})
    assert spec.rope == spec_of(text_config(SPECS["qwen3"])).rope
    expected, scale = of_transformers(spec.rope.theta, spec.rope.rotary_dim, fields)
    assert torch.equal(spec.rope.frequencies(), expected) and scale == spec.rope.scale


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"factor": 0.5}, "factor in config.json must be at least 1"),
        ({"factor": "4"}, "factor in config.json must be a number"),
        ({"factor": None}, "config.json lacks factor"),
        ({"original_max_position_embeddings": 0.5}, "original_max_position_embeddings"),
        ({"beta_fast": -1}, "beta_fast in config.json must be positive"),
        ({"attention_factor": 0}, "attention_factor in config.json must be positive"),
        ({"rope_theta": 1.0}, "rope_theta in config.json must be more than 1 with YaRN"),
        ({"rope_type": "longrope"}, "rope_type 'longrope' is not supported"),
    ],
)
def test_bad_numbers_are_named(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        spec_of(spec_with(**ADDED | fields))
