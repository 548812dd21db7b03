"""Adapters of routed experts: in one tensor (`target_parameters`), and expert by expert."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from changed_driver import ChangedDriver, rows_alone_and_together
from families import SPECS
from make_checkpoint import make_checkpoint
from model_driver import text_sequence
from peft_folders import (
    adapted_experts,
    fused_experts,
    linears,
    random_expert_factors,
    random_factors,
    write_adapter,
)

from vlm_serve.errors import CheckpointError
from vlm_serve.models import Model, load_model
from vlm_serve.models.adapters import (
    Adapter,
    changes_of,
    place,
    read_adapter,
    to_send,
    without_effect,
)
from vlm_serve.models.parts import feed_forward

TOKENS = [(7 * index * index + 3) % 300 for index in range(40)]
RANK, SCALE = 3, 2.0
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ALL = ("gate_up_proj", "down_proj")


def loaded(path: Path, folder: Path, *, compiled: bool) -> tuple[Model, Adapter]:
    model = load_model(path, torch.float32, "cpu", compiled=compiled)
    return model, place(read_adapter(folder), model.modules, ALL)


def logits(model: Model, adapter: Adapter, *, compiled: bool) -> torch.Tensor:
    driver = ChangedDriver(model, [adapter], compiled=compiled)
    driver.of_tokens = [0] * len(TOKENS)
    return driver.prefill(text_sequence(TOKENS))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["text, moe", "vl moe", "next", "qwen3 moe"])
def test_experts_in_one_tensor(tmp_path: Path, name: str, compiled: bool) -> None:
    path = make_checkpoint(tmp_path / "model", SPECS[name])
    tensors = random_expert_factors(fused_experts(path), 3, RANK)
    folder = write_adapter(tmp_path / "adapter", tensors, RANK, target_parameters=BOTH)
    tokens = {"input_ids": torch.tensor([TOKENS])}
    plain = oracle.logits(path, tokens)
    with adapted_experts(path, tensors, RANK, SCALE):
        expected = oracle.logits(path, tokens)
    assert (expected - plain).abs().max() > 0.02, "the adapter changes nothing"
    got = logits(*loaded(path, folder, compiled=compiled), compiled=compiled)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("version", [None, "0.21.2", "0.19.0", "0.18.1", "0.18.2.dev0@abc"])
@pytest.mark.parametrize("name", ["text, moe", "vl moe"])
def test_square_experts_are_laid_out_by_the_rule_of_their_writer(
    tmp_path: Path, name: str, version: str | None
) -> None:
    """gate_up_proj is square: its shape does not say what is in and what is out."""
    spec = replace(SPECS[name], hidden_size=64, moe_intermediate_size=32)
    path = make_checkpoint(tmp_path / "model", spec)
    shapes = fused_experts(path)
    assert any(rows == columns for _, rows, columns in shapes.values())
    older = version is None or version < "0.19"
    tensors = random_expert_factors(shapes, 3, RANK)
    if not older:  # In and out are swapped since then.
        turned = {each: (count, i, o) for each, (count, o, i) in shapes.items()}
        tensors = random_expert_factors(turned, 3, RANK)
    fields = {"target_parameters": BOTH} | ({"peft_version": version} if version else {})
    folder = write_adapter(tmp_path / "adapter", tensors, RANK, **fields)
    with adapted_experts(path, tensors, RANK, SCALE, turned=not older):
        expected = oracle.logits(path, {"input_ids": torch.tensor([TOKENS])})
    got = logits(*loaded(path, folder, compiled=True), compiled=True)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", ["text, moe", "qwen3 moe"])
def test_experts_in_one_piece_as_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Change experts in one tensor, and some by tensors of their own, with other ranks."""
    path = make_checkpoint(tmp_path / "model", SPECS[name])
    tensors = random_expert_factors(fused_experts(path), 3, RANK)
    folder = write_adapter(tmp_path / "adapter", tensors, RANK, target_parameters=BOTH)
    with adapted_experts(path, tensors, RANK, SCALE):
        expected = oracle.logits(path, {"input_ids": torch.tensor([TOKENS])})
    apart, adapter = loaded(path, folder, compiled=False)
    some = {each: own for each, own in adapter.modules.items() if "experts.1." in each}
    some |= {each: own for each, own in adapter.modules.items() if "experts.3.up" in each}
    other = replace(adapter, modules=some, changes=changes_of(some, apart.modules))
    few = logits(apart, other, compiled=False)
    monkeypatch.setattr(feed_forward, "stacked_experts", lambda device: True)
    model, adapter = loaded(path, folder, compiled=False)
    got = logits(model, adapter, compiled=False)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)
    (first, *_) = [adapter.changes.by_site[each] for each in model.modules.stacked]
    assert first.width == RANK, "gate and up share u"
    other = replace(adapter, modules=some, changes=changes_of(some, model.modules))
    torch.testing.assert_close(logits(model, other, compiled=False), few, atol=2e-4, rtol=0)
    nothing = without_effect(model.modules, ALL)
    assert nothing.by_site.keys() >= model.modules.stacked.keys()
    none = replace(adapter, changes=nothing)
    plain = oracle.logits(path, {"input_ids": torch.tensor([TOKENS])})
    torch.testing.assert_close(logits(model, none, compiled=False), plain, atol=2e-4, rtol=0)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_host_holds_factors_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stacked: bool
) -> None:
    """Modules are views of the changes, and have the bits that name the adapter."""
    path = make_checkpoint(tmp_path / "model", SPECS["text, moe"])
    tensors = random_factors(linears(path), 3, rank=RANK)
    tensors |= random_expert_factors(fused_experts(path), 5, RANK)
    folder = write_adapter(tmp_path / "adapter", tensors, RANK, target_parameters=BOTH)
    monkeypatch.setattr(feed_forward, "stacked_experts", lambda device: stacked)
    model = load_model(path, torch.float32, "cpu")
    file = read_adapter(folder, torch.bfloat16)
    adapter = place(file, model.modules, ALL)
    held = [each for own in adapter.modules.values() for each in (own.down, own.up)]
    for change in adapter.changes.by_site.values():
        held += [change.down, change.scales, *(up.values for up in change.ups)]
    storages = [each.untyped_storage() for each in held]
    taken = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
    assert file.nbytes <= taken < 1.2 * file.nbytes
    whole = changes_of(adapter.modules, model.modules)
    again = replace(adapter, modules=dict(adapter.modules), changes=whole)
    assert again.digest == adapter.digest == place(file, model.modules, ALL).digest


@pytest.mark.parametrize("stacked", [False, True])
def test_an_expert_is_sent_to_other_ranks_without_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stacked: bool
) -> None:
    path = make_checkpoint(tmp_path / "model", SPECS["text, moe"])
    rank = 16
    tensors = random_expert_factors(fused_experts(path), 3, rank)
    folder = write_adapter(tmp_path / "adapter", tensors, rank, target_parameters=BOTH)
    monkeypatch.setattr(feed_forward, "stacked_experts", lambda device: stacked)
    model, adapter = loaded(path, folder, compiled=False)
    numbers = sum(each.nbytes for each in adapter.modules.values())
    sent = pickle.dumps(to_send(adapter.modules), protocol=5)
    # Names and shapes take some hundred bytes a tensor.
    assert len(sent) < numbers + 1000 * len(adapter.modules)
    found = pickle.loads(sent)
    assert replace(adapter, modules=found).digest == adapter.digest
    changes = changes_of(found, model.modules)
    assert changes.by_site.keys() == adapter.changes.by_site.keys()
    assert changes.factor_bytes == adapter.changes.factor_bytes, "gate and up still have one A"


@pytest.mark.parametrize("kind", ALL)
def test_one_tensor_alone(tmp_path: Path, kind: str) -> None:
    path = make_checkpoint(tmp_path / "model", SPECS["text, moe"])
    own = {name: each for name, each in fused_experts(path).items() if name.endswith(kind)}
    tensors = random_expert_factors(own, 3, RANK, alone=True)
    if kind == "down_proj":  # a module wrapped once has no base_layer in its names
        tensors = {name.replace(".base_layer", ""): each for name, each in tensors.items()}
    folder = write_adapter(
        tmp_path / "adapter", tensors, RANK, target_parameters=[f"experts.{kind}"]
    )
    model, adapter = loaded(path, folder, compiled=True)
    assert {name.split(".")[-1] for name in adapter.modules} == (
        {"gate_proj", "up_proj"} if kind == "gate_up_proj" else {"down_proj"}
    )
    assert place(read_adapter(folder), model.modules, (kind,)).digest == adapter.digest


@pytest.mark.parametrize("compiled", [False, True])
def test_experts_apart_are_those_of_the_same_change_in_one_tensor(
    tmp_path: Path, compiled: bool
) -> None:
    """An adapter of one expert's projections, beside transformers with the changed tensor."""
    path = make_checkpoint(tmp_path / "model", SPECS["qwen3 moe"])
    sizes: dict[str, tuple[int, int]] = {}
    for name, (_, rows, columns) in fused_experts(path).items():
        module, _, kind = name.rpartition(".")
        for own in ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj"):
            size = (rows, columns) if kind == "down_proj" else (rows // 2, columns)
            sizes |= {f"{module}.{expert}.{own}": size for expert in range(0, 8, 3)}
    tensors = random_factors(sizes, 5, rank=RANK)
    folder = write_adapter(tmp_path / "adapter", tensors, RANK)
    parameters, before = dict(oracle.model(path).named_parameters()), {}
    for key, down in tensors.items():
        if ".lora_A." not in key:
            continue
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        module, expert, own = name.rsplit(".", 2)
        stacked = f"{module}.{'down_proj' if own == 'down_proj' else 'gate_up_proj'}"
        if stacked not in before:
            before[stacked] = parameters[stacked].data
            parameters[stacked].data = before[stacked].clone()
        change = SCALE * tensors[key.replace("lora_A", "lora_B")] @ down
        first = len(change) if own == "up_proj" else 0
        parameters[stacked].data[int(expert), first : first + len(change)] += change
    expected = oracle.logits(path, {"input_ids": torch.tensor([TOKENS])})
    for name, data in before.items():
        parameters[name].data = data
    got = logits(*loaded(path, folder, compiled=compiled), compiled=compiled)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_of_other_adapters_change_no_bit(tmp_path: Path, compiled: bool) -> None:
    path = make_checkpoint(tmp_path / "model", SPECS["text, moe"])
    model = load_model(path, torch.float32, "cpu", compiled=compiled)
    adapters = []
    for seed in range(3):
        rank = 2 + seed
        tensors = random_expert_factors(fused_experts(path), seed, rank)
        folder = write_adapter(tmp_path / str(seed), tensors, rank, target_parameters=BOTH)
        adapters.append(place(read_adapter(folder), model.modules, ALL))
    rows_alone_and_together(model, adapters, compiled=compiled)


def _cut(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each[:-1] if "lora_A" in name else each for name, each in tensors.items()}


def _outer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each for name, each in tensors.items() if "base_layer" not in name}


@pytest.mark.parametrize(
    ("change", "fields", "allowed", "words"),
    [
        (dict, {}, (), "--lora-experts all allows it"),
        (dict, {}, ("down_proj",), "--lora-experts all allows it"),
        (dict, {"target_parameters": None}, ALL, "names 0 of gate_up_proj and down_proj"),
        (dict, {"target_parameters": [BOTH[0]]}, ALL, "factors for 2 tensors"),
        (dict, {"target_parameters": "experts"}, ALL, "target_parameters is no list of names"),
        (dict, {"r": 5}, ALL, "says rank 5 for every expert"),
        (_cut, {}, ALL, "says rank 3 for every expert"),
        (_outer, {}, ALL, "factors for 1 tensors"),
        (
            lambda t: {k: v[:, 8:] if "A" in k else v for k, v in t.items()},
            {},
            ALL,
            "another model",
        ),
        (
            lambda t: {k: torch.cat([v] * 2, int("B" in k)) for k, v in t.items()},
            {},
            ALL,
            "has expert 8",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, change: Any, fields: dict[str, Any], allowed: tuple[str, ...], words: str
) -> None:
    path = make_checkpoint(tmp_path / "model", SPECS["text, moe"])
    tensors = change(random_expert_factors(fused_experts(path), 3, RANK))
    folder = write_adapter(
        tmp_path / "adapter", tensors, RANK, **({"target_parameters": BOTH} | fields)
    )
    modules = load_model(path, torch.float32, "cpu").modules
    with pytest.raises(CheckpointError) as caught:
        place(read_adapter(folder), modules, allowed)
    assert words in str(caught.value)
