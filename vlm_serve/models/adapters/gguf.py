"""An adapter as one file, as llama.cpp's convert_lora_to_gguf.py writes it."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from vlm_serve.errors import CheckpointError
from vlm_serve.models.gguf.blocks import decode
from vlm_serve.models.gguf.reader import GgufFile, Metadata
from vlm_serve.models.gguf.tensors import EXPERTS, LAYER

_NAME = re.compile(r"(?:blk\.(\d{1,6})\.)?(\w+)\.weight\.lora_([ab])")


def gguf_factors(path: Path) -> tuple[dict[str, dict[str, torch.Tensor]], float]:
    """Return A and B of every module, as stored, and alpha; 0: the scale is 1. Raise
    CheckpointError for a file that is damaged or no adapter, or has unsupported tensors."""
    file = GgufFile(path)
    metadata = Metadata(file.metadata, path.name)
    if metadata.text("adapter.type", "") != "lora":
        raise CheckpointError(f"{path.name} is no adapter: its adapter.type is not 'lora'")
    factors: dict[str, dict[str, torch.Tensor]] = {}
    for name, entry in file.tensors.items():
        match = _NAME.fullmatch(name)
        module = match and _module(match[1], match[2])
        if match is None or module is None or len(entry.shape) != 2 + ("{}" in module):
            raise CheckpointError(
                f"{name} in {path.name} is no factor that such files can have here: name the "
                "adapter's folder, as PEFT saved it"
            )
        values = file.blocks(name) if entry.type.quantised else file.numbers(name)
        if entry.type.quantised:
            values = decode(entry.type, values.flatten(0, -2)).values().view(entry.shape)
        for index, own in enumerate(values if "{}" in module else [values]):
            factors.setdefault(module.format(index), {})[match[3].upper()] = own
    for module, pair in factors.items():
        if len(pair) < 2 or pair["A"].shape[0] != pair["B"].shape[1]:
            raise CheckpointError(f"{path.name} lacks a factor of {module}, or has another rank")
    return factors, metadata.number("adapter.lora.alpha", 0.0)


def _module(layer: str | None, base: str) -> str | None:
    """Return a module's name, with a place for an expert's number; None: it is not supported, as
    layers with a state are not, whose value heads lie in another order in such files."""
    experts = EXPERTS.get(base, ())
    if layer is None:
        return "lm_head" if base == "output" else None
    inside = f"mlp.experts.{{}}.{experts[0]}" if len(experts) == 1 else LAYER.get(base)
    return inside and f"layers.{layer}.{inside}"
