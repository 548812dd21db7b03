"""A model in a GGUF file answers as transformers does with the numbers that its blocks stand
for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from checkpoint_spec import CheckpointSpec
from gguf import GGMLQuantizationType as Kind
from gguf_numbers import numbers
from gguf_writer import WIDE, Choice, blocks, write_model
from make_checkpoint import make_checkpoint
from parity import greedy
from parity_cases import random_ids
from sweeps import quick

from vlm_serve.models.gguf.reader import BY_NAME
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

TEXT: dict[str, Any] = WIDE | {"vision_depth": 0}
SPECS = {
    "qwen3": CheckpointSpec(family="qwen3", **TEXT),
    "qwen3_5": CheckpointSpec(gdn_key_heads=2, gdn_value_heads=2, **TEXT),
}
"""As many value heads as key heads: those of a file are in the order of the checkpoint."""
MIXED = "Q4_K, Q5_K, Q6_K and Q8_0"
CASES = [(name, kind) for kind in (*BY_NAME, MIXED) for name in SPECS]
QUICK = [("qwen3", "Q4_K"), ("qwen3_5", "Q6_K"), ("qwen3_5", MIXED)]


def choice(kind: str) -> Choice:
    """Matrices in one type, or in several as the published mixes have them."""
    if kind != MIXED:
        return blocks(Kind[kind])
    places = {"attn_q.": "Q5_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "ssm_out": "Q8_0"}

    def chosen(name: str, shape: tuple[int, ...]) -> Kind:
        own = next((each for part, each in places.items() if part in name), "Q4_K")
        return blocks(Kind[own])(name, shape)

    return chosen


@pytest.mark.parametrize(("name", "kind"), quick(CASES, QUICK, several=True))
def test_greedy_tokens(name: str, kind: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", SPECS[name])
    file = write_model(checkpoint, tmp_path / "coded.gguf", choice(kind))
    plain = numbers(checkpoint, file, tmp_path / "plain")
    prompts = [random_ids(50, 5), random_ids(9, 6)]
    options: dict[str, Any] = {"dtype": "float32", "block_size": 16, "cache_memory": "64MiB"}
    with Pipeline(file, EngineConfig(quantized_activations="none", **options)) as pipe:
        found = [each.token_ids for each in pipe.generate_many(prompts, greedy(24))]
    for prompt, answer in zip(prompts, found, strict=True):
        assert answer == oracle.greedy(plain, {"input_ids": torch.tensor([prompt])}, 24)
