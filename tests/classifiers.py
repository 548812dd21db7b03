"""Random checkpoints with a head of labels, and transformers' answers for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import oracle
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from safetensors.torch import load_file, save_file

CLASSES = {
    "qwen3": "Qwen3ForSequenceClassification",
    "qwen3_moe": "Qwen3MoeForSequenceClassification",
    "qwen3_5_text": "Qwen3_5TextForSequenceClassification",
    "qwen3_next": "Qwen3NextForSequenceClassification",
    "qwen3_5": "Qwen3_5ForSequenceClassification",
}
"""By model type."""


def make_classifier(path: Path, spec: CheckpointSpec, labels: Sequence[str], **fields: Any) -> Path:
    """Write a random checkpoint whose output projection is replaced by a head of labels."""
    make_checkpoint(path, spec)
    config = json.loads((path / "config.json").read_text())
    config |= {
        "architectures": [CLASSES[config["model_type"]]],
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
        "pad_token_id": 5,
        **fields,
    }
    if "text_config" in config:
        config["text_config"]["pad_token_id"] = config["pad_token_id"]
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    draws = torch.Generator().manual_seed(3)
    head = torch.randn(len(labels), spec.hidden_size, generator=draws) / 4
    tensors["score.weight"] = head.to(next(iter(tensors.values())).dtype)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@torch.no_grad()
def logits(path: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """transformers' logits of the labels for a prompt."""
    oracle.prepare_models()
    import transformers

    name = json.loads((path / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(path, dtype=torch.float32).eval()
    found = model(input_ids=torch.tensor([list(token_ids)])).logits[0]
    return torch.as_tensor(found).float()
