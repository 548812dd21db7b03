"""The numbers in the blocks of a GGUF file, as a checkpoint."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from gguf import GGUFReader
from gguf_blocks import decode
from gguf_writer import text_tensors
from safetensors.torch import load_file, save_file


def numbers(checkpoint: Path, file: Path, target: Path) -> Path:
    """The checkpoint with the values of the file's matrices, in float32."""
    shutil.copytree(checkpoint, target)
    config = json.loads((target / "config.json").read_text())
    tensors = load_file(target / "model.safetensors")
    stored = {each.name: each for each in GGUFReader(file).tensors}
    for name in [name for name, each in tensors.items() if each.ndim == 2]:
        ((own, _),) = text_tensors(config, {name: tensors[name]})
        values = torch.from_numpy(decode(stored[own].data, stored[own].tensor_type).copy())
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert is not None:  # The file has all of them in one tensor.
            values = values.view(-1, *tensors[name].shape)[int(expert[1])].clone()
        tensors[name] = values.view(tensors[name].shape)
    save_file({name: each.float() for name, each in tensors.items()}, target / "model.safetensors")
    return target
