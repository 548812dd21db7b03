"""Published configurations are read as their models are, where they lie beside the project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vlm_serve.commands.plan import make
from vlm_serve.models.parts.attention import Attention
from vlm_serve.models.registry import FAMILIES, spec_of
from vlm_serve.models.weight_sizes import weight_bytes
from vlm_serve.options.config import EngineConfig

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "published" / "configs"
NAMES = sorted(
    file.name.removesuffix("_config.json")
    for file in FOLDER.glob("*_config.json")
    if not file.name.endswith("_hf_quant_config.json")
) or ["none of them"]
SIZES = {
    "Qwen--Qwen3-0.6B": 0.60,
    "Qwen--Qwen3-1.7B": 1.72,
    "Qwen--Qwen3-8B": 8.19,
    "Qwen--Qwen3-32B": 32.8,
    "Qwen--Qwen3-30B-A3B": 30.5,
    "Qwen--Qwen3-235B-A22B": 235,
    "Qwen--Qwen3-Coder-480B-A35B-Instruct": 480,
    "Qwen--Qwen3.5-27B": 27,
    "Qwen--Qwen3.5-35B-A3B": 35,
    "Qwen--Qwen3.5-122B-A10B": 122,
    "Qwen--Qwen3.5-397B-A17B": 397,
    "Qwen--Qwen3-VL-2B-Instruct": 2.1,
    "Qwen--Qwen3-VL-30B-A3B-Instruct": 31,
    "Qwen--Qwen3-VL-235B-A22B-Instruct": 236,
}
"""Billions of weights that the cards state."""


def config_of(name: str) -> dict[str, Any]:
    file = FOLDER / f"{name}_config.json"
    if not file.is_file():
        pytest.skip("the published configurations do not lie beside the project")
    config: dict[str, Any] = json.loads(file.read_text())
    beside = FOLDER / f"{name}_hf_quant_config.json"
    if beside.is_file() and "quantization_config" not in config:
        fields = json.loads(beside.read_text())
        config["quantization_config"] = {"quant_method": "modelopt", **fields}
    return config


@pytest.mark.parametrize("name", NAMES)
def test_every_one_is_supported(name: str) -> None:
    config = config_of(name)
    spec, served = spec_of(config), FAMILIES[config["model_type"]]
    text = config.get("text_config", config)
    assert len(spec.layers) == text["num_hidden_layers"]
    assert spec.max_position_embeddings == text["max_position_embeddings"]
    assert (spec.vision is not None) == bool(served.media)
    assert spec.cache_layout().has_state == served.state
    mixers = {type(mixer) for layer in spec.layers for mixer in layer.mixers}
    assert (len(mixers) == 1) == (not served.state) and Attention in mixers
    quantised = any(part in name for part in ("FP8", "NVFP4"))
    assert (spec.quantization is not None) is quantised


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_those_of_the_cards(name: str) -> None:
    spec = spec_of(config_of(name))
    found = weight_bytes(
        spec,
        weights=torch.bfloat16,
        compute=torch.bfloat16,
        device=torch.device("cuda"),
        compiled=False,
    )
    billions = (found.projections + found.table + found.others) / 2e9
    if spec.tied_embeddings:
        billions -= spec.vocab_size * spec.hidden_size / 1e9
    assert billions == pytest.approx(SIZES[name], rel=0.04)


def test_a_plan_is_made_of_a_published_file(tmp_path: Path) -> None:
    name = "nvidia--Qwen3.6-35B-A3B-NVFP4"
    config_of(name)
    plan = make(str(FOLDER / f"{name}_config.json"), EngineConfig(cache_memory="4GiB"))
    assert 18 <= (plan.weights.projections + plan.weights.others) / (1 << 30) <= 22
