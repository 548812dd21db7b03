"""Where drafts come from unless it was said."""

from __future__ import annotations

import pytest
import torch

from vlm_serve.engine.start.draft_start import why_off, with_drafts
from vlm_serve.options.config import EngineConfig


@pytest.mark.parametrize(
    ("device", "ranks", "compiled", "expected"),
    [
        ("cpu", 1, True, "suffix"),
        ("cpu", 1, False, "off"),
        ("cpu", 2, True, "off"),
        ("cuda", 1, False, "off"),
    ],
)
def test_drafts_are_made_where_they_are_known_to_cost_nothing(
    device: str, ranks: int, compiled: bool, expected: str
) -> None:
    config, where = EngineConfig(tensor_parallel_size=ranks), torch.device(device)
    assert with_drafts(config, where, compiled=compiled).speculative == expected
    assert bool(why_off(where, ranks, compiled=compiled)) == (expected == "off")


def test_what_was_asked_for_is_done() -> None:
    for asked in ("off", "suffix"):
        config = EngineConfig(speculative=asked)
        for device in ("cpu", "cuda"):
            assert with_drafts(config, torch.device(device), compiled=False) is config
