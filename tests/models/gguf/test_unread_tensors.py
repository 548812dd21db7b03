"""A weight in blocks has several names; whichever is read, nothing of the file is unread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from gguf import GGMLQuantizationType as Kind
from gguf_writer import WIDE, blocks, write_model
from make_checkpoint import make_checkpoint

from vlm_serve.models import load_model, resolve_checkpoint

SPECS = {
    "tied": CheckpointSpec(tied_embeddings=True, vision_depth=0, **WIDE),
    "other order of columns": CheckpointSpec(gdn_key_heads=2, vision_depth=0, **WIDE),
    "experts": CheckpointSpec(family="qwen3", num_experts=4, vision_depth=0, **WIDE),
}


@pytest.mark.parametrize("kind", ["Q4_K", "IQ2_XXS", "Q8_0"])
@pytest.mark.parametrize("name", SPECS)
def test_nothing_is_said_to_be_unread(
    name: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", SPECS[name])
    file = write_model(checkpoint, tmp_path / "model.gguf", blocks(Kind[kind]))
    load_model(resolve_checkpoint(file, tower="none"), torch.float32, "cpu")
    assert "are not read" not in caplog.text
