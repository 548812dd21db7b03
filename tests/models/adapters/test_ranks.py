"""Adapters over ranks that share a model: B is split as the base's rows, A as its columns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import oracle
import pytest
import torch
from changed_driver import ChangedDriver
from families import FAMILIES
from make_checkpoint import make_checkpoint
from model_driver import text_sequence
from peft_folders import (
    adapted,
    adapted_experts,
    fused_experts,
    linears,
    random_expert_factors,
    random_factors,
    write_adapter,
)
from rank_threads import on_ranks

from vlm_serve.kernels.ranks import Ranks
from vlm_serve.models import load_model, read_spec
from vlm_serve.models.adapters import place, read_adapter
from vlm_serve.models.parts import feed_forward

pytestmark = pytest.mark.usefixtures("compiler")

TOKENS = [(7 * index * index + 3) % 300 for index in range(40)]
ALL = ("gate_up_proj", "down_proj")
SPECS = {
    kind: replace(
        next(iter(FAMILIES[kind].values())),
        attention_heads=8,
        gdn_key_heads=4,
        gdn_value_heads=8,
        moe_intermediate_size=64,
    )
    for kind in ("qwen3_5", "qwen3_next", "qwen3_vl_moe")
}


def folder_of(path: Path, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """An adapter of all Linears and, where there are some, of all experts; and the latter part."""
    tensors = random_factors(linears(path), 3, rank=4)
    experts = random_expert_factors(fused_experts(path), 5, 4)
    names = [f"experts.{each}" for each in ALL] if experts else None
    return write_adapter(folder, tensors | experts, 4, target_parameters=names), experts


@pytest.mark.parametrize("compiled", [False, True], ids=["ops", "compiled"])
@pytest.mark.parametrize("kind", SPECS)
def test_ranks_answer_as_the_unmerged_adapter(tmp_path: Path, kind: str, compiled: bool) -> None:
    path = make_checkpoint(tmp_path / "model", SPECS[kind])
    folder, experts = folder_of(path, tmp_path / "adapter")
    with adapted(path, folder, {"": 2.0}), adapted_experts(path, experts, 4, 2.0):
        expected = oracle.logits(path, {"input_ids": torch.tensor([TOKENS])})
    read_spec(path)  # imports what threads cannot import at the same time

    def logits(company: list[int]) -> torch.Tensor:
        """Of the tokens behind a prompt without an adapter, of so many tokens."""

        def work(ranks: Ranks) -> torch.Tensor:
            model = load_model(path, torch.float32, "cpu", compiled=compiled, ranks=ranks)
            adapter = place(read_adapter(folder), model.modules, ALL)
            driver = ChangedDriver(model, [adapter], compiled=compiled, ranks=ranks.size)
            prompts = [TOKENS[:each] for each in company] + [TOKENS]
            driver.of_tokens = [-1] * sum(company) + [0] * len(TOKENS)
            ranks.begin(1)
            slices = [(text_sequence(each), 0, len(each)) for each in prompts]
            return driver.step(prefills=slices).logits[sum(company) :]

        found = on_ranks(2, work)[0]
        assert isinstance(found, torch.Tensor), found
        return found

    alone = logits([])
    torch.testing.assert_close(alone, expected, atol=2e-4, rtol=0)
    if compiled:
        assert torch.equal(alone, logits([20]))


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_vl_moe"])
def test_ranks_with_experts_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As GPUs have them."""
    monkeypatch.setattr(feed_forward, "stacked_experts", lambda device: True)
    path = make_checkpoint(tmp_path / "model", SPECS[kind])
    folder, experts = folder_of(path, tmp_path / "adapter")
    with adapted(path, folder, {"": 2.0}), adapted_experts(path, experts, 4, 2.0):
        expected = oracle.logits(path, {"input_ids": torch.tensor([TOKENS])})
    read_spec(path)

    def work(ranks: Ranks) -> torch.Tensor:
        model = load_model(path, torch.float32, "cpu", ranks=ranks)
        assert model.modules.stacked
        adapter = place(read_adapter(folder), model.modules, ALL)
        driver = ChangedDriver(model, [adapter], compiled=False, ranks=ranks.size)
        driver.of_tokens = [0] * len(TOKENS)
        ranks.begin(1)
        return driver.step(prefills=[(text_sequence(TOKENS), 0, len(TOKENS))]).logits

    found = on_ranks(2, work)[0]
    assert isinstance(found, torch.Tensor), found
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
