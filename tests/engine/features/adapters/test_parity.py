"""Greedy tokens of random adapters are those of transformers with PEFT's formula, unmerged."""

from __future__ import annotations

from pathlib import Path

import oracle
import pytest
import torch
from families import SPECS
from make_checkpoint import make_checkpoint
from parity import greedy, inputs_of
from parity_cases import photograph, random_ids, user
from peft_folders import (
    adapted,
    adapted_experts,
    fused_experts,
    linears,
    random_expert_factors,
    random_factors,
    write_adapter,
)
from sweeps import quick

from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

KINDS = ["dense", "vl", "vl moe", "next", "vl of qwen2", "vl of qwen2.5", "omni"]
CASES = [(kind, seed) for kind in KINDS for seed in range(3)]
QUICK = [("vl moe", 0)]


@pytest.mark.parametrize(("kind", "seed"), quick(CASES, QUICK, several=True))
def test_greedy_tokens(tmp_path: Path, kind: str, seed: int) -> None:
    """Of text and, where there is a tower, of a picture; every projection is changed."""
    path, rank = make_checkpoint(tmp_path / "model", SPECS[kind]), 2 + 3 * seed
    # Of Qwen3-Omni the part that hears is not served.
    sizes = {name: size for name, size in linears(path).items() if "audio_tower" not in name}
    tensors = random_factors(sizes, seed, rank=rank)
    experts = random_expert_factors(fused_experts(path), seed, rank)
    names = ["experts.gate_up_proj", "experts.down_proj"] if experts else None
    folder = write_adapter(tmp_path / "a", tensors | experts, rank, target_parameters=names)
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        block_size=16,
        cache_memory="32MiB",
        lora_modules=(f"a={folder}",),
        lora_experts="all",
    )
    ids, chat = random_ids(50, seed), [user(photograph("cell.png"), "What is this?")]
    inputs = [{"input_ids": torch.tensor([ids])}]
    with Pipeline(path, config) as pipe:
        got = [pipe.generate(ids, greedy(24), lora="a").token_ids]
        if pipe.engine.spec.vision is not None:
            got.append(pipe.chat(chat, greedy(24), lora="a").token_ids)
            inputs.append(inputs_of(path, chat))
    with adapted(path, folder, {"": 2.0}), adapted_experts(path, experts, rank, 2.0):
        assert got == [oracle.greedy(path, each, 24) for each in inputs]
