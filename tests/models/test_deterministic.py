"""With `deterministic`, a row's bits depend on its own sequence alone.

docs/architecture.md#what-a-hit-guarantees
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from model_driver import Driver, text_sequence

from vlm_serve.models import load_model

SPECS = {
    "dense": CheckpointSpec(num_layers=4, vision_depth=0),
    "moe": CheckpointSpec(num_layers=4, vision_depth=0, num_experts=4),
    "odd sizes": CheckpointSpec(
        num_layers=4, vision_depth=0, hidden_size=72, intermediate_size=100, gdn_value_heads=6
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_resuming_anywhere_in_any_company(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model = load_model(make_checkpoint(tmp_path, SPECS[name]), dtype, "cpu")
    draw = random.Random(0)
    tokens = draw.choices(range(400), k=120)
    cuts = (7, 21, 43, 70, 100)
    driver = Driver(model, deterministic=True, num_blocks=400, num_rows=40)
    cold = text_sequence(tokens, cuts)
    rows = [driver.take_row() for _ in cuts]
    whole = driver.step(
        prefills=[(cold, 0, 120)],
        snapshots=[(cold, cut, row) for cut, row in zip(cuts, rows, strict=True)],
    ).logits
    for cut, row in zip(cuts, rows, strict=True):
        warm = text_sequence(tokens, cuts)
        warm.blocks, warm.row, warm.started = list(cold.blocks), row, True
        others = [text_sequence(draw.choices(range(400), k=n)) for n in (1, 3, 60)]
        decoding = text_sequence([5])
        driver.step(prefills=[(decoding, 0, 1)])
        decoding.tokens.append(6)
        logits = driver.step([decoding], [(others[0], 0, 1), (warm, cut, 120), (others[2], 0, 60)])
        assert torch.equal(logits.logits[2 : 2 + 120 - cut], whole[cut:]), cut


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_on_several_threads(tmp_path: Path, threads: int) -> None:
    """Threads split element-wise work at places that depend on the batch."""
    model = load_model(make_checkpoint(tmp_path, SPECS["odd sizes"]), torch.float32, "cpu")
    tokens = random.Random(1).choices(range(400), k=700)
    torch.set_num_threads(threads)
    try:
        alone = Driver(model, deterministic=True).step(
            prefills=[(text_sequence(tokens[:650]), 0, 650)]
        )
        pair = [(text_sequence(tokens[:77]), 0, 77), (text_sequence(tokens[:650]), 0, 650)]
        together = Driver(model, deterministic=True).step(prefills=pair)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(together.logits[77:], alone.logits)
