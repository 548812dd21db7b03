"""Quantised experts in one tensor, as kernels for GPUs take them, beside experts apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from model_driver import Driver, text_sequence

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.linear import Part
from vlm_serve.kernels.linear.stored_codes import Stored
from vlm_serve.models import load_model
from vlm_serve.models.parts import feed_forward
from vlm_serve.models.parts.feed_forward import LoadedExperts
from vlm_serve.models.weights import Weights


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = CheckpointSpec(vision_depth=0, num_experts=5)
    return make_checkpoint(tmp_path_factory.mktemp("experts"), spec)


@pytest.mark.parametrize("bits", [8, 4])
def test_equal_those_apart(checkpoint: Path, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def logits() -> torch.Tensor:
        model = load_model(checkpoint, torch.float32, "cpu", bits=bits)
        experts = model._decoder.layers[0].branches[1].part
        assert isinstance(experts, LoadedExperts)
        assert isinstance(experts.gate_up, Stored) == stacked
        return Driver(model).step(prefills=[(text_sequence(range(40)), 0, 40)]).logits

    stacked = False
    apart = logits()
    stacked = True
    monkeypatch.setattr(feed_forward, "stacked_experts", lambda device: True)
    together = logits()
    torch.testing.assert_close(together, apart, rtol=1e-3, atol=1e-4)


def test_experts_that_are_stored_in_two_ways(checkpoint: Path) -> None:
    """Some as codes, some as they are."""
    weights = Weights(checkpoint, torch.float32, torch.device("cpu"), bits=8)
    name = f"{weights.text_prefix}layers.0.mlp.experts.gate_up_proj"
    shape = weights.shape_of(name)
    assert shape is not None
    coded = Part(name, shape, (range(8),), index=0, least_bits=4)
    table = f"{weights.text_prefix}embed_tokens.weight"
    whole = weights.shape_of(table)
    assert whole is not None
    plain = Part(table, whole, (range(8),))
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight is stored otherwise than .*up"):
        weights.stacked([coded, plain], 2)
