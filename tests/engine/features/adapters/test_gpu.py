"""Adapters as a GPU serves them: the base's Triton kernels interpreted, factors placed beside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from parity_cases import random_ids
from peft_folders import (
    adapted,
    adapted_experts,
    fused_experts,
    random_adapter,
    random_expert_factors,
    write_adapter,
)
from safetensors.torch import load_file
from triton_case import engines_on_triton

from vlm_serve.engine.start import adapter_start as start
from vlm_serve.engine.start.step_memory import adapter_slot_bytes
from vlm_serve.engine.steps.memory import StepMemory
from vlm_serve.kernels.linear.low_rank import AdapterChanges, RowChanges
from vlm_serve.kernels.linear.low_rank_factors import LowRankChange, Up
from vlm_serve.kernels.triton_support import interpreted
from vlm_serve.models.parts import feed_forward
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

TINY = CheckpointSpec(
    num_layers=2,
    full_attention_interval=2,
    gdn_key_heads=1,
    gdn_value_heads=1,
    attention_heads=2,
    kv_heads=1,
    vision_depth=0,
    num_experts=4,
)
CONFIG = EngineConfig(
    device="cpu",
    dtype="float32",
    block_size=16,
    cache_memory="4MiB",
    speculative="off",
    compiled_kernels=False,
)
NAME = "adapter_model.safetensors"
CPU = torch.device("cpu")


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[AdapterChanges]]:
    """Triton kernels for CPU tensors; yields the adapters that were placed."""
    placed: list[AdapterChanges] = []

    def place(changes: AdapterChanges) -> None:
        placed.append(changes)
        changes.place(CPU)

    monkeypatch.setattr(feed_forward, "stacked_experts", lambda device: True)
    monkeypatch.setattr(start, "_lay_out", lambda source: place)
    with engines_on_triton():
        yield placed


@pytest.mark.interpreter
@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")
def test_answers_are_those_of_the_unmerged_adapter(
    tmp_path: Path, as_on_gpu: list[AdapterChanges]
) -> None:
    model = make_checkpoint(tmp_path / "model", TINY)
    random_adapter(model, tmp_path / "a", 0, only=["layers", "lm_head"])
    config = replace(CONFIG, lora_modules=(f"a={tmp_path / 'a'}",))
    ids, params = random_ids(40, 4), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with np.errstate(all="ignore"), Pipeline(model, config) as pipe:
        adapter = pipe.engine.adapters.find("a").identity  # type: ignore[union-attr]
        changed, plain = (
            pipe.generate(ids, params, adapter=each) if each else pipe.generate(ids, params)
            for each in (adapter, None)
        )
        again = pipe.generate(ids, params, adapter=adapter)
    inputs = {"input_ids": torch.tensor([ids])}
    assert plain.token_ids == oracle.greedy(model, inputs, 4)
    with adapted(model, tmp_path / "a", {"": 2.0}):
        assert changed.token_ids == oracle.greedy(model, inputs, 4)
    assert again.token_ids == changed.token_ids != plain.token_ids
    assert again.usage.cached_tokens > 0
    assert len(as_on_gpu) == 1 and as_on_gpu[0].layout_bytes > 0


def test_placed_factors_are_used_until_they_are_dropped() -> None:
    change = LowRankChange(torch.ones(2, 3), torch.ones(2), (Up(0, 0, torch.ones(4, 2)),))
    changes = AdapterChanges({1: change}, 1)
    rows = RowChanges([changes], [0, -1])
    meta = torch.device("meta")
    assert changes.at(1, CPU) is change and changes.layout_bytes == 0
    assert changes.at(1, meta).down.device == meta
    changes.place(meta)
    assert changes.layout_bytes == change.nbytes == 4 * (6 + 2 + 8)
    assert changes.at(1, meta) is changes.at(1, meta)
    (own, places), (none, others) = rows.groups(1, meta)
    assert own is changes.at(1, meta) and places.device == others.device == meta
    assert none is None
    changes.drop_layout()
    assert changes.at(1, CPU) is change and changes.layout_bytes == 0


def test_memory_of_the_slots_is_reserved(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", TINY)
    for rank in (2, 8):
        random_adapter(model, tmp_path / f"a{rank}", 0, only=["lm_head"], rank=rank)
    named = tuple(f"a{rank}={tmp_path / f'a{rank}'}" for rank in (2, 8))

    def reserved(**options: Any) -> int:
        return adapter_slot_bytes(replace(CONFIG, lora_modules=named, **options))

    one = reserved(max_loras=1)
    assert one == sum(each.nbytes for each in load_file(tmp_path / "a8" / NAME).values())
    assert reserved(max_loras=3) == 3 * one
    assert StepMemory(5, 3, 1, one).total == 6 + one
    assert adapter_slot_bytes(CONFIG) == 0


@pytest.mark.interpreter
@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")
def test_routed_experts_are_changed(tmp_path: Path, as_on_gpu: list[AdapterChanges]) -> None:
    model = make_checkpoint(tmp_path / "model", TINY)
    tensors = random_expert_factors(fused_experts(model), 3, 4)
    names = ["experts.gate_up_proj", "experts.down_proj"]
    folder = write_adapter(tmp_path / "a", tensors, 4, target_parameters=names)
    config = replace(CONFIG, lora_modules=(f"a={folder}",), lora_experts="all")
    ids, params = random_ids(20, 4), SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    with np.errstate(all="ignore"), Pipeline(model, config) as pipe:
        changed, plain = pipe.generate_many([ids, ids], params, lora=["a", None])
    inputs = {"input_ids": torch.tensor([ids])}
    assert plain.token_ids == oracle.greedy(model, inputs, 3)
    with adapted_experts(model, tensors, 4, 2.0):
        assert changed.token_ids == oracle.greedy(model, inputs, 3)
    assert changed.token_ids != plain.token_ids and len(as_on_gpu) == 1
    factors = sum(each.nbytes for each in tensors.values())
    assert adapter_slot_bytes(config) == config.max_loras * factors
