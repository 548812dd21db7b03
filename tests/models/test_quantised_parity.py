"""Logits and greedy tokens of quantised checkpoints equal those of transformers with the same
values in float32, as the format's own package reads them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import oracle
import pytest
import quantised_oracles
import torch
from checkpoint_spec import CheckpointSpec
from families import SPECS
from make_checkpoint import make_checkpoint
from model_driver import Driver, text_sequence
from quantised_weights import FORMATS
from sweeps import quick

from vlm_serve.models import load_model

TOLERANCE = 1e-4
# Rows that blocks of 128 cut, and heads of 32 whose gates lie between queries.
DENSE = CheckpointSpec(num_layers=4, intermediate_size=160, dtype="bfloat16", vision_depth=0)
MOE = dataclasses.replace(DENSE, num_experts=4, moe_intermediate_size=64)
# Square tensors of experts would not say whether they are transposed.
VL = dataclasses.replace(SPECS["vl moe"], dtype="bfloat16", moe_intermediate_size=96)
NEXT = dataclasses.replace(SPECS["next"], dtype="bfloat16")
QWEN3 = dataclasses.replace(SPECS["qwen3"], dtype="bfloat16")
QWEN2 = dataclasses.replace(SPECS["vl of qwen2.5"], dtype="bfloat16")
OMNI = dataclasses.replace(SPECS["omni"], dtype="bfloat16")
OTHERS = {
    "vl": dataclasses.replace(VL, num_experts=0, quantization="awq"),
    "vl moe": dataclasses.replace(VL, quantization="gptq"),
    "vl moe fused": dataclasses.replace(VL, quantization="fp8-fused"),
    "next": dataclasses.replace(NEXT, quantization="fp8"),
    "next int4": dataclasses.replace(NEXT, quantization="int4"),
    "qwen3": dataclasses.replace(QWEN3, quantization="fp8"),
    "qwen3 nvfp4": dataclasses.replace(QWEN3, quantization="nvfp4-modelopt"),
    "qwen3 moe": dataclasses.replace(QWEN3, num_experts=6, quantization="awq"),
    "qwen3 moe int4": dataclasses.replace(QWEN3, num_experts=6, quantization="gptq"),
    "qwen3 moe fp8": dataclasses.replace(QWEN3, num_experts=6, quantization="fp8"),
    "qwen2.5 vl gptq": dataclasses.replace(QWEN2, quantization="gptq"),
    "qwen2.5 vl awq": dataclasses.replace(QWEN2, quantization="awq"),
    "omni": dataclasses.replace(OMNI, quantization="awq"),
    "blocks cut": dataclasses.replace(
        DENSE, hidden_size=192, head_dim=64, intermediate_size=320, quantization="fp8"
    ),
}
CASES = {
    **{f"dense {kind}": dataclasses.replace(DENSE, quantization=kind) for kind in FORMATS},
    **{f"moe {kind}": dataclasses.replace(MOE, quantization=kind) for kind in FORMATS},
    **OTHERS,
}
QUICK = ("dense awq", "dense mixed", "moe fp8", "moe gptq-mlp", "next")

Maker = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    made: dict[str, tuple[Path, Path]] = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp("quantised")
            path = make_checkpoint(folder / "codes", CASES[name])
            made[name] = path, quantised_oracles.dequantised(path, folder / "plain")
        return made[name]

    return make


def random_tokens(count: int) -> list[int]:
    return random.Random(count).choices(range(400), k=count)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_logits(checkpoints: Maker, name: str, compiled: bool) -> None:
    path, plain = checkpoints(name)
    dense = torch.bfloat16 if compiled else torch.float32
    model = load_model(path, dense, "cpu", compute_dtype=torch.float32, compiled=compiled)
    tokens = random_tokens(40)
    assert model.quantised
    expected = oracle.logits(plain, {"input_ids": torch.tensor([tokens])})
    got = Driver(model).prefill(text_sequence(tokens))
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", quick(CASES, QUICK))
def test_greedy_tokens(checkpoints: Maker, name: str) -> None:
    path, plain = checkpoints(name)
    tokens = random_tokens(20)
    expected = oracle.greedy(plain, {"input_ids": torch.tensor([tokens])}, 24)
    model = load_model(path, torch.float32, "cpu")
    assert Driver(model).generate(text_sequence(tokens), 24) == expected
