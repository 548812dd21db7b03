"""Adapters over quantised weights: A sees activations as they are; a row, its own adapter alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import oracle
import pytest
import quantised_oracles
import torch
from changed_driver import ChangedDriver, rows_alone_and_together
from checkpoint_spec import CheckpointSpec
from gguf import GGMLQuantizationType as Kind
from gguf_numbers import numbers
from gguf_writer import WIDE, blocks, write_model
from make_checkpoint import make_checkpoint
from model_driver import text_sequence
from peft_folders import adapted, random_adapter

from vlm_serve.models import load_model
from vlm_serve.models.adapters import place, read_adapter

pytestmark = pytest.mark.usefixtures("compiler")

TOKENS = [(7 * index * index + 3) % 300 for index in range(40)]
DENSE = CheckpointSpec(num_layers=4, intermediate_size=160, dtype="bfloat16", vision_depth=0)
MOE = dataclasses.replace(DENSE, num_experts=4, moe_intermediate_size=64)
STORED = {
    "awq": dataclasses.replace(DENSE, quantization="awq"),
    "fp8": dataclasses.replace(DENSE, quantization="fp8"),
    "mixed": dataclasses.replace(DENSE, quantization="mixed"),
    "moe gptq": dataclasses.replace(MOE, quantization="gptq"),
}
ON_LOAD = [(bits, dynamic) for bits in (8, 6, 4) for dynamic in (False, True)]


def change(model_path: Path, names: Path, folder: Path, seed: int, **options: Any) -> Any:
    """A random adapter of the Linears of `names`, beside a model of the other checkpoint."""
    model = load_model(model_path, torch.float32, "cpu", compiled=True, **options)
    random_adapter(names, folder, seed, rank=5)
    return model, place(read_adapter(folder), model.modules)


@pytest.mark.parametrize("name", STORED)
def test_stored_codes_answer_as_the_unmerged_adapter_over_their_numbers(
    tmp_path: Path, name: str
) -> None:
    path = make_checkpoint(tmp_path / "codes", STORED[name])
    plain = quantised_oracles.dequantised(path, tmp_path / "plain")
    model, adapter = change(path, plain, tmp_path / "adapter", 3)
    assert model.quantised
    with adapted(plain, tmp_path / "adapter", {"": 2.0}):
        expected = oracle.logits(plain, {"input_ids": torch.tensor([TOKENS])})
    for compiled in (False, True):
        driver = ChangedDriver(model, [adapter], compiled=compiled)
        driver.of_tokens = [0] * len(TOKENS)
        got = driver.prefill(text_sequence(TOKENS))
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_blocks_of_gguf_answer_as_the_unmerged_adapter_over_their_numbers(
    tmp_path: Path, kind: str
) -> None:
    spec = CheckpointSpec(gdn_key_heads=2, gdn_value_heads=2, **(WIDE | {"vision_depth": 0}))
    checkpoint = make_checkpoint(tmp_path / "model", spec)
    file = write_model(checkpoint, tmp_path / "coded.gguf", blocks(Kind[kind]))
    plain = numbers(checkpoint, file, tmp_path / "plain")
    model, adapter = change(file, plain, tmp_path / "adapter", 3)
    assert model.quantised
    with adapted(plain, tmp_path / "adapter", {"": 2.0}):
        expected = oracle.logits(plain, {"input_ids": torch.tensor([TOKENS])})
    driver = ChangedDriver(model, [adapter], compiled=True)
    driver.of_tokens = [0] * len(TOKENS)
    got = driver.prefill(text_sequence(TOKENS))
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(("bits", "dynamic"), ON_LOAD)
def test_codes_made_on_load(tmp_path: Path, bits: int, dynamic: bool) -> None:
    """A compiled step agrees with ops, and each row has its bits alone."""
    path = make_checkpoint(tmp_path / "model", DENSE)
    model, adapter = change(path, path, tmp_path / "a", 3, bits=bits, dynamic=dynamic)
    random_adapter(path, tmp_path / "b", 4, rank=3, only=["q_proj", "in_proj_z", "down_proj"])
    adapters = [adapter, place(read_adapter(tmp_path / "b"), model.modules)]
    by_ops, whole = (ChangedDriver(model, adapters, compiled=each) for each in (False, True))
    found = []
    for driver in (by_ops, whole):
        driver.of_tokens = [0] * len(TOKENS)
        found.append(driver.prefill(text_sequence(TOKENS)))
    torch.testing.assert_close(*found, atol=2e-4, rtol=0)
    rows_alone_and_together(model, adapters, compiled=True)
