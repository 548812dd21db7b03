"""A random checkpoint is read by transformers as it stands, and says what it was asked to be."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import oracle
import pytest
import torch
from checkpoint_parts import CHAT_TEMPLATE, SPLIT_PATTERN, build_tokenizer
from checkpoint_spec import BENCHMARK_SPECS, CheckpointSpec
from families import SPECS
from make_checkpoint import main, make_checkpoint
from random_weights import entries
from safetensors.torch import load_file
from tokenizers import Tokenizer

DENSE = CheckpointSpec(num_layers=4, shards=2)
MOE = CheckpointSpec(num_layers=4, num_experts=4, tied_embeddings=True, dtype="bfloat16")
TEXT = CheckpointSpec(num_layers=4, vision_depth=0)


@pytest.mark.parametrize(
    ("spec", "architecture"),
    [
        (DENSE, "Qwen3_5ForConditionalGeneration"),
        (MOE, "Qwen3_5MoeForConditionalGeneration"),
        (TEXT, "Qwen3_5ForCausalLM"),
        (dataclasses.replace(TEXT, num_experts=4), "Qwen3_5MoeForCausalLM"),
    ],
)
def test_transformers_loads_every_weight(
    tmp_path: Path, spec: CheckpointSpec, architecture: str
) -> None:
    model = oracle.model(make_checkpoint(tmp_path, spec))
    assert type(model).__name__ == architecture
    held = dict(model.named_parameters())
    for file in tmp_path.glob("*.safetensors"):
        for name, value in load_file(file).items():
            assert torch.equal(held[name], value.float()), name
    tied = {"lm_head.weight"} if spec.tied_embeddings else set()
    assert held.keys() - tied == {name for name, _, _ in entries(spec)}


FOUND = [name for name, spec in SPECS.items() if spec.family not in ("qwen3_5", "qwen3_omni")]
"""Specs of families that transformers' automatic classes know: they know no thinker alone."""


@pytest.mark.parametrize("name", FOUND)
def test_transformers_finds_and_knows_every_weight(tmp_path: Path, name: str) -> None:
    """Of families whose experts it merges or transposes."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    oracle.prepare_models()
    path = make_checkpoint(tmp_path, SPECS[name])
    multimodal = SPECS[name].vision_depth > 0
    loader = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    model, told = loader.from_pretrained(path, output_loading_info=True)
    assert type(model).__name__.startswith(SPECS[name].architecture + "For")
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = oracle.tokenizer(path)
    general = SPECS[name].sliced or SPECS[name].family == "granitemoehybrid"
    kind = "TokenizersBackend" if general else "Qwen2Tokenizer"
    assert type(tokenizer).__name__ == kind
    plain = Tokenizer.from_file(str(path / "tokenizer.json"))
    for text in ("a\u0301\u0323b 12", "It's naïve \u0e17\u0e35\u0e48 \u0915\u093f"):
        assert tokenizer(text).input_ids == plain.encode(text, add_special_tokens=False).ids


def test_greedy_output_of_random_weights_is_lively(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, DENSE)
    ids = oracle.tokenizer(path)("Where is the red circle?", return_tensors="pt").input_ids
    generated = oracle.greedy(path, {"input_ids": ids}, 32)
    assert len(set(generated)) > 16


def test_same_spec_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (make_checkpoint(tmp_path / name, DENSE) for name in ("a", "b"))
    names = sorted(file.name for file in first.iterdir())
    assert names == sorted(file.name for file in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    other = make_checkpoint(tmp_path / "c", dataclasses.replace(DENSE, seed=1))
    shard = "model-00001-of-00002.safetensors"
    assert (first / shard).read_bytes() != (other / shard).read_bytes()


def test_autotokenizer_and_tokenizer_json_agree(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, TEXT)
    plain = Tokenizer.from_file(str(path / "tokenizer.json"))
    installed = oracle.tokenizer(path)
    for text in (
        "It's 1234 o'clock,\r\n\n  naïve café  ",
        "e\u0301 composed, 你好 \U0001f600 \x00 <|im_end|>",
        "<think>\n\n</think>\n\n<tool_call> x <|image_pad|>",
    ):
        assert installed(text).input_ids == plain.encode(text, add_special_tokens=False).ids
    assert plain.decode(plain.encode("<think> a <|im_end|>").ids) == "<think> a "
    assert type(installed).__name__ == "Qwen3_5Tokenizer"
    assert TEXT.vocab_size - 8 <= plain.get_vocab_size() == len(installed) <= TEXT.vocab_size


def test_tokenizer_of_bytes_only() -> None:
    tokenizer = build_tokenizer([], 512)
    assert tokenizer.get_vocab_size() == 256 + 13
    assert len(tokenizer.encode("abc é").ids) == 6
    with pytest.raises(ValueError, match="at least 269"):
        build_tokenizer([], 268)
    assert "\\p{M}" in SPLIT_PATTERN


def test_processor_configs_reach_transformers(tmp_path: Path) -> None:
    spec = dataclasses.replace(DENSE, patch_size=16, spatial_merge_size=4, image_max_pixels=4096)
    processor = oracle.processor(make_checkpoint(tmp_path, spec))
    assert processor.image_processor.patch_size == processor.video_processor.patch_size == 16
    assert processor.image_processor.merge_size == 4
    assert processor.image_processor.size["longest_edge"] == 4096
    assert processor.video_processor.cap_pixels_per_frame is True
    assert processor.chat_template == CHAT_TEMPLATE
    config = json.loads((tmp_path / "config.json").read_text())
    assert processor.image_token_id == config["image_token_id"]
    assert processor.video_token_id == config["video_token_id"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path / "x"), "--num-layers", "8", "--tied-embeddings", "--dtype", "bfloat16"])
    assert "bfloat16" in capsys.readouterr().out
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config["text_config"]["num_hidden_layers"] == 8
    assert config["tie_word_embeddings"] is True
    main([str(tmp_path / "z"), "--family", "qwen3_next"])
    assert json.loads((tmp_path / "z" / "config.json").read_text())["model_type"] == "qwen3_next"
    with pytest.raises(SystemExit):
        main([str(tmp_path / "y"), "--kv-heads", "3"])
    assert "multiple of kv_heads" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path / "y"), "--benchmark", "--family", "qwen3_next"])
    assert "no benchmark model of qwen3_next" in capsys.readouterr().err
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"gdn_value_heads": 3},
        {"head_dim": 12},
        {"vision_heads": 5},
        {"num_position_embeddings": 60},
        {"num_experts": 4, "experts_per_token": 5},
        {"dtype": "int8"},
        {"family": "llama"},
        {"family": "qwen2", "vision_depth": 2},
        {"family": "qwen2_vl", "head_dim": 24},
        {"family": "qwen3_next", "num_experts": 4},
        {"family": "qwen3_vl", "vision_depth": 0},
        {"family": "qwen3_vl", "deepstack_features": 3},
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(reversed(change)))):
        dataclasses.replace(DENSE, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", BENCHMARK_SPECS)
def test_benchmark_models_have_49m_weights(family: str) -> None:
    total = sum(torch.Size(shape).numel() for _, shape, _ in entries(BENCHMARK_SPECS[family]))
    assert total == pytest.approx(49e6, rel=0.01)
