"""Quantised checkpoints that draft with their own layer, whose experts and projections are codes
too, answer as transformers does with the values of the codes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import oracle
import pytest
import quantised_oracles
import torch
from checkpoint_spec import CheckpointSpec
from guesses import draft_freely
from make_checkpoint import make_checkpoint
from parity import greedy
from parity_cases import random_ids
from quantised_weights import FORMATS
from sweeps import quick

from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

pytestmark = pytest.mark.usefixtures("compiler")
DENSE = CheckpointSpec(
    num_layers=4, intermediate_size=160, dtype="bfloat16", vision_depth=0, mtp=True
)
SPECS = {
    "dense": DENSE,
    "moe": replace(DENSE, num_experts=4, moe_intermediate_size=64),
    "next": replace(DENSE, family="qwen3_next", num_experts=4, moe_intermediate_size=64),
}
CASES = [(name, kind) for name in SPECS for kind in FORMATS if name != "next" or kind == "fp8"]
QUICK = [("dense", "gptq"), ("moe", "fp8")]
OPTIONS = EngineConfig(
    dtype="float32",
    block_size=16,
    cache_memory="64MiB",
    quantized_activations="none",
    speculative="mtp",
    speculative_tokens=3,
)


@pytest.mark.parametrize(("name", "kind"), quick(CASES, QUICK, several=True))
def test_greedy_tokens(name: str, kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "codes", replace(SPECS[name], quantization=kind))
    prompt = random_ids(50, 5)
    with Pipeline(path, OPTIONS) as pipe:
        draft_freely(pipe.engine)
        found = pipe.generate(prompt, greedy(24)).token_ids
        assert pipe.engine.stats()["drafts"]["draft_tokens"] > 20
    plain = quantised_oracles.dequantised(path, tmp_path / "plain")
    assert found == oracle.greedy(plain, {"input_ids": torch.tensor([prompt])}, 24)
