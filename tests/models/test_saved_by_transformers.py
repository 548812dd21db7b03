"""Checkpoints that transformers' own classes make and save are served as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import parity
import pytest
import torch
from families import SPECS
from make_checkpoint import make_checkpoint
from PIL import Image

from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

CLASSES = {
    "dense": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
    "moe, three value heads, four kv heads": (
        "Qwen3_5MoeConfig",
        "Qwen3_5MoeForConditionalGeneration",
    ),
    "text, tied": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "text, moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration"),
    "vl moe": ("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration"),
    "next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3 moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "granite h": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
    "nemotron": ("NemotronHConfig", "NemotronHForCausalLM"),
    "minicpm": ("MiniCPMV4_6Config", "MiniCPMV4_6ForConditionalGeneration"),
    "minicpm ocr": ("MiniCPMOcrConfig", "MiniCPMOcrForConditionalGeneration"),
}
# Fields of published files that no class of transformers has.
PUBLISHED_ONLY = ("attn_output_gate", "mamba_ssm_dtype", "mrope_section", "mrope_interleaved")


def without(value: Any) -> Any:
    """A section without what its class does not have."""
    if not isinstance(value, dict):
        return value
    return {name: without(each) for name, each in value.items() if name not in PUBLISHED_ONLY}


def save(name: str, folder: Path) -> Path:
    """A random model of transformers' class, saved by it with tokenizer and processor."""
    oracle.prepare_models()
    import transformers

    config, model = (getattr(transformers, each) for each in CLASSES[name])
    source = make_checkpoint(folder / "source", SPECS[name])
    raw = without(json.loads((source / "config.json").read_text()))
    for each in ("model_type", "architectures"):
        raw.pop(each, None)
    torch.manual_seed(7)
    made = model(config(**raw)).float().eval()
    with torch.no_grad():
        for values in made.parameters():  # livelier than the class's own beginning
            if values.dim() > 1:
                values.copy_(torch.randn_like(values) * values.shape[-1] ** -0.5)
    target = folder / "saved"
    made.save_pretrained(target)
    whole = oracle.processor if SPECS[name].vision_depth else oracle.tokenizer
    whole(source).save_pretrained(target)
    return target


@pytest.mark.parametrize("name", CLASSES)
def test_greedy_answers_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    path = save(name, tmp_path)
    raw = json.loads((path / "config.json").read_text())
    text = raw.get("text_config", raw)
    assert "attn_output_gate" not in text and "mrope_section" not in text.get("rope_parameters", {})
    prompts: list[Any] = [[{"role": "user", "content": "Where is the red circle?"}], [5] * 40]
    if SPECS[name].vision_depth:
        noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / "picture.png")
        parts = [{"type": "image", "image": str(tmp_path / "picture.png")}]
        prompts.append([{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}])
    config = EngineConfig(
        dtype="float32", cache_memory="16MiB", max_model_len=512, speculative="off"
    )
    with Pipeline(str(path), config) as pipe:
        _, found = parity.check(pipe, path, prompts, 24)
    assert all(each.acceptable and each.logit_error <= each.allowed for each in found), found
