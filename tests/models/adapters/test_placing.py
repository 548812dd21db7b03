"""Adapters of PEFT give the logits that transformers gives with them, unmerged, in float32."""

from __future__ import annotations

import shutil
from pathlib import Path

import oracle
import pytest
import torch
from changed_driver import ChangedDriver, rows_alone_and_together
from families import SPECS
from make_checkpoint import make_checkpoint
from model_driver import text_sequence
from peft_folders import adapted, random_adapter
from safetensors.torch import load_file, save_file

from vlm_serve.models import Model, load_model
from vlm_serve.models.adapters import Adapter, place, read_adapter
from vlm_serve.models.parts import feed_forward

TOKENS = [(7 * index * index + 3) % 300 for index in range(40)]
NAMES = ["dense", "text, tied", "vl", "next", "text, moe", "qwen3", "minicpm"]


def loaded(path: Path, folder: Path, *, compiled: bool) -> tuple[Model, Adapter]:
    model = load_model(path, torch.float32, "cpu", compiled=compiled)
    return model, place(read_adapter(folder), model.modules)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_unmerged_adapter(
    tmp_path: Path, name: str, compiled: bool
) -> None:
    path = make_checkpoint(tmp_path / "model", SPECS[name])
    folder = random_adapter(path, tmp_path / "adapter", 3, rank=5)
    tokens = {"input_ids": torch.tensor([TOKENS])}
    plain = oracle.logits(path, tokens)
    with adapted(path, folder, {"": 2.0}):
        expected = oracle.logits(path, tokens)
    assert (expected - plain).abs().max() > 0.05, "the adapter changes nothing"
    model, adapter = loaded(path, folder, compiled=compiled)
    driver = ChangedDriver(model, [adapter], compiled=compiled)
    driver.of_tokens = [0] * len(TOKENS)
    got = driver.prefill(text_sequence(TOKENS))
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)


def test_adapters_of_gate_and_up_in_one_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU has them."""
    path = make_checkpoint(tmp_path / "model", SPECS["dense"])
    folder = random_adapter(path, tmp_path / "adapter", 3, only=["up_proj", "gate_proj"], rank=5)

    def logits() -> torch.Tensor:
        model, adapter = loaded(path, folder, compiled=False)
        driver = ChangedDriver(model, [adapter], compiled=False)
        driver.of_tokens = [0] * len(TOKENS)
        return driver.prefill(text_sequence(TOKENS))

    expected = logits()
    monkeypatch.setattr(feed_forward, "stacked_experts", lambda device: True)
    torch.testing.assert_close(logits(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["dense", "text, moe", "next"])
def test_rows_of_other_adapters_change_no_bit(tmp_path: Path, name: str, compiled: bool) -> None:
    path = make_checkpoint(tmp_path / "model", SPECS[name])
    model = load_model(path, torch.float32, "cpu", compiled=compiled)
    adapters = []
    for seed, only in enumerate(([], ["q_proj", "in_proj_z", "gate_proj"], ["down_proj"])):
        folder = random_adapter(path, tmp_path / str(seed), seed, only=only, rank=3 + 2 * seed)
        adapters.append(place(read_adapter(folder), model.modules))
    rows_alone_and_together(model, adapters, compiled=compiled)


@pytest.mark.parametrize("inner", ["", "language_model."])
def test_modules_of_a_thinker_named_as_in_the_whole_model(tmp_path: Path, inner: str) -> None:
    """An adapter may be made for the thinker alone or for the model that speaks as well."""
    path = make_checkpoint(tmp_path / "model", SPECS["omni"])
    parts = ("language_model.layers.0.self_attn.", "visual.", "lm_head")
    alone = random_adapter(path, tmp_path / "alone", 0, only=parts)
    whole = tmp_path / "whole"
    shutil.copytree(alone, whole)
    tensors = {
        name.replace(".model.", ".model.thinker.", 1)
        .replace("language_model.", inner)
        .replace(".model.visual.", ".visual."): tensor
        for name, tensor in load_file(alone / "adapter_model.safetensors").items()
    }
    assert all(name.startswith("base_model.model.thinker.") for name in tensors)
    save_file(tensors, whole / "adapter_model.safetensors")
    model = load_model(path, torch.float32, "cpu")
    found = [place(read_adapter(folder), model.modules) for folder in (alone, whole)]
    assert found[0].digest == found[1].digest and found[0].vision_digest != ""
