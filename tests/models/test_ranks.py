"""A model over several ranks gives what it gives alone, by ops and compiled, in every family."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from make_checkpoint import make_checkpoint
from model_driver import Driver, text_sequence
from rank_threads import on_ranks

from vlm_serve.errors import ConfigError
from vlm_serve.kernels.ranks import ALONE, Ranks
from vlm_serve.models import load_model, read_spec

pytestmark = pytest.mark.usefixtures("compiler")

SPECS = {
    kind: replace(
        next(iter(shapes.values())),
        attention_heads=8,
        gdn_value_heads=8,
        moe_intermediate_size=64,
        gdn_key_heads=1 if kind.startswith("granite") else 4,
        hidden_size=128 if kind.startswith(("qwen2", "granite")) else 64,
    )
    for kind, shapes in FAMILIES.items()
}
"""Models with two heads of keys and values, which four ranks repeat, as all do with the B and C of
the one group that Granite's Mamba2 layers have."""


def _logits(path: Path, ranks: Ranks, compiled: bool) -> torch.Tensor:
    """Of a prompt in two slices, of decode steps beside another prompt, and of drafts."""
    model = load_model(path, torch.float32, "cpu", compiled=compiled, ranks=ranks)
    driver = Driver(model, ranks=ranks.size, most_drafts=4)
    if compiled:
        model.compile_steps(driver.caches)
    one, other = text_sequence(range(3, 60), cuts=(20,)), text_sequence(range(100, 140))
    ranks.begin(1)
    found = [driver.prefill(one, splits=(20,))]
    for token in (7, 9):
        one.tokens.append(token)
        steps = [(other, 0, 40)] if token == 9 else []
        found.append(driver.step(decodes=[one], prefills=steps).logits)
    one.tokens += [11, 13, 15]
    found.append(driver.step(drafts=[(one, len(one.tokens) - 3, 0)]).logits)
    return torch.cat(found)


@pytest.mark.parametrize("compiled", [False, True], ids=["ops", "compiled"])
@pytest.mark.parametrize("kind", SPECS)
def test_ranks_agree_with_a_model_that_is_not_shared(
    tmp_path: Path, kind: str, compiled: bool
) -> None:
    path = make_checkpoint(tmp_path, SPECS[kind])
    alone = _logits(path, ALONE, compiled)
    for size in (2, 4):
        shared, *_ = on_ranks(size, lambda ranks: _logits(path, ranks, compiled))
        assert isinstance(shared, torch.Tensor), shared
        assert shared.shape == alone.shape
        errors = (shared - alone).abs().amax(-1).sort(descending=True).values
        # One position of a random model may amplify what sums in another order round.
        assert errors[0] < 1e-3 and errors[1] < 1e-4


def test_sums_do_not_depend_on_company(tmp_path: Path) -> None:
    """A prompt alone, and beside another one: the same bits."""
    path, between_steps = make_checkpoint(tmp_path, SPECS["qwen3_5"]), threading.Barrier(4)
    read_spec(path)  # imports what threads cannot import at the same time

    def work(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
        model = load_model(path, torch.float32, "cpu", compiled=True, ranks=ranks)
        found = []
        for company in (0, 1):
            driver = Driver(model, ranks=ranks.size)
            model.compile_steps(driver.caches)
            between_steps.wait()
            ranks.begin(1 + company)
            one, other = text_sequence(range(3, 60)), text_sequence(range(100, 400))
            prefills = [(one, 0, 57), (other, 0, 300)][: 1 + company]
            found.append(driver.step(prefills=prefills).logits[:57])
        return found[0], found[1]

    for pair in on_ranks(4, work):
        assert isinstance(pair, tuple), pair
        assert torch.equal(*pair)


def test_a_table_in_another_type_is_shared_out_too(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, replace(SPECS["qwen3_5"], dtype="bfloat16", vocab_size=514))

    def table(ranks: Ranks) -> torch.Tensor:
        model = load_model(path, torch.float32, "cpu", ranks=ranks)
        assert len(model._decoder.embedding) == len(ranks.share(514))
        ranks.begin(1)
        return model._look_up(torch.arange(514))

    whole = table(ALONE)
    for found in on_ranks(4, table):
        assert isinstance(found, torch.Tensor), found
        assert torch.equal(found, whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_heads": 6}, "6 attention heads cannot be split over 4 ranks"),
        ({"kv_heads": 3, "attention_heads": 12}, "3 key-value heads cannot"),
        ({"gdn_key_heads": 2}, "2 linear key heads cannot"),
        ({"intermediate_size": 130}, "130 columns of the feed-forward cannot"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    spec = read_spec(make_checkpoint(tmp_path, replace(SPECS["qwen3_5"], **changes)))
    with pytest.raises(ConfigError, match=message):
        spec.cache_layout(4)
