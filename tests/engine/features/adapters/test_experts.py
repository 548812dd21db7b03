"""Engines with adapters of routed experts: opted into, counted, and answered with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import oracle
import pytest
import torch
from families import SPECS
from make_checkpoint import make_checkpoint
from parity_cases import random_ids
from peft_folders import adapted_experts, fused_experts, random_expert_factors, write_adapter

from vlm_serve.engine.start.adapter_start import planned_bytes
from vlm_serve.errors import CheckpointError
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def test_answers_are_those_of_the_changed_experts(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", SPECS["qwen3 moe"])
    tensors = random_expert_factors(fused_experts(path), 3, 4)
    names = ["experts.gate_up_proj", "experts.down_proj"]
    folder = write_adapter(tmp_path / "adapter", tensors, 4, target_parameters=names)
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        block_size=16,
        cache_memory="32MiB",
        lora_modules=(f"tuned={folder}",),
    )
    with pytest.raises(CheckpointError, match="--lora-experts all allows it"):
        Pipeline(path, config)
    config = replace(config, lora_experts="all")
    factors = sum(each.nbytes for each in tensors.values())
    assert planned_bytes(config, compiled=False) == factors
    assert planned_bytes(config, compiled=True) > 2 * factors
    ids = random_ids(40, 4)
    with Pipeline(path, config) as pipe:
        got = pipe.generate(ids, GREEDY, adapter=pipe.engine.adapters.identity_of("tuned"))
        plain = pipe.generate(ids, GREEDY)
    inputs = {"input_ids": torch.tensor([ids])}
    assert plain.token_ids == oracle.greedy(path, inputs, 12)
    with adapted_experts(path, tensors, 4, 2.0):
        assert got.token_ids == oracle.greedy(path, inputs, 12)
    assert got.token_ids != plain.token_ids
